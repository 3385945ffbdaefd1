// The tokens of an answer, step by step. Tab reaches one step, the arrow keys lead to the others.
import { Component, createRef, html } from "./html.js";
import { Token } from "./tokens.js";
import { Tree } from "./tree.js";

export class Strip extends Component {
  constructor() {
    super();
    this.state = { focused: 0, opened: null };
    this.list = createRef();
  }

  // Where `follows` is given, the end of the strip stays in sight while it grows.
  componentDidUpdate({ steps }) {
    const list = this.list.current;
    if (this.props.follows && steps.length !== this.props.steps.length) list.scrollTop = list.scrollHeight;
  }

  move = (event) => {
    const last = this.props.steps.length - 1;
    const from = this.state.focused;
    const to = { ArrowRight: from + 1, ArrowDown: from + 1, ArrowLeft: from - 1, ArrowUp: from - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const focused = Math.min(Math.max(to, 0), last);
    this.setState({ focused });
    this.list.current.querySelectorAll("button")[focused].focus();
  };

  open = (index) => {
    this.setState(({ opened }) => ({ focused: index, opened: opened === index ? null : index }));
  };

  close = () => {
    this.setState({ opened: null });
    this.list.current.querySelectorAll("button")[this.state.focused].focus();
  };

  render({ steps, label }, { focused, opened }) {
    const step = steps[opened];
    return html`<div class="strip-and-tree">
      <div class="strip" role="group" aria-label="${label}; arrow keys lead from step to step" ref=${this.list} onKeyDown=${this.move}>
        ${steps.map(
          (one, index) =>
            html`<${Step} key=${index} step=${one} index=${index} isFocused=${index === focused} isOpen=${index === opened} open=${this.open} />`,
        )}
      </div>
      ${step && html`<${Tree} step=${step} root=${steps[opened - 1]?.tokens.at(-1)} number=${opened + 1} close=${this.close} />`}
    </div>`;
  }
}

class Step extends Component {
  shouldComponentUpdate(next) {
    return ["step", "isFocused", "isOpen"].some((name) => next[name] !== this.props[name]);
  }

  render({ step, index, isFocused, isOpen, open }) {
    return html`<button
        type="button"
        class="step"
        tabindex=${isFocused ? 0 : -1}
        aria-expanded=${String(isOpen)}
        aria-label=${described(step, index)}
        onClick=${() => open(index)}
      >
        ${step.tokens.map((token, place) => html`<${Token} key=${place} token=${token} />`)}
      </button>
      ${step.tokens.some((token) => token.text.includes("\n")) && html`<br />`}`;
  }
}

// The text of a step for screen readers, with the outcome of its draft.
function described(step, index) {
  const text = step.tokens.map((token) => token.text).join("");
  const accepted = step.tokens.filter((token) => token.origin === "accepted").length;
  const outcome = step.drafts.length ? `${accepted} of ${step.drafts.length} draft tokens accepted` : "no draft";
  return `Step ${index + 1}: “${text}”, ${outcome}`;
}
