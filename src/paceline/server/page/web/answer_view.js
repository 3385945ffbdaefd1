// An answer: its text, its numbers in one line, its tokens by step behind that, and what can be done with it.
import { Component, html } from "./html.js";
import { DONE, FAILED, LOST, STOPPED, STREAMING, WAITING, isRunning, numbersOf, summaryOf } from "./answer.js";
import { ComparisonView } from "./comparison_view.js";
import { Markdown } from "./markdown.js";
import { isPlain } from "./request.js";
import { Strip } from "./strip.js";
import { Legend } from "./tokens.js";
import { Versions } from "./versions.js";

const COPIED_MS = 2000;

export class AnswerView extends Component {
  constructor({ opensTokens }) {
    super();
    this.state = { isCopied: false, showsTokens: opensTokens };
  }

  shouldComponentUpdate(next, state) {
    const isChanged = ["node", "isBusy"].some((name) => next[name] !== this.props[name]) || next.ids.length !== this.props.ids.length;
    return isChanged || ["isCopied", "showsTokens"].some((name) => state[name] !== this.state[name]);
  }

  componentWillUnmount() {
    clearTimeout(this.timer);
  }

  copy = async () => {
    await navigator.clipboard.writeText(this.props.node.answer.text);
    this.setState({ isCopied: true });
    this.timer = setTimeout(() => this.setState({ isCopied: false }), COPIED_MS);
  };

  render({ node: { id, answer, comparison }, ids, isBusy, actions, model }, { isCopied, showsTokens }) {
    const hasSteps = answer.steps.length > 0;
    return html`<article class="turn answer" aria-label="Answer" aria-busy=${String(isRunning(answer))}>
      <h2>${model}</h2>
      ${answer.status === WAITING && html`<p class="waiting">…</p>`}
      ${answer.thoughts && html`<details class="thoughts"><summary>Thoughts</summary><${Markdown} text=${answer.thoughts} /></details>`}
      <${Markdown} text=${answer.text} />
      <${Ending} answer=${answer} />
      ${hasSteps &&
      html`<details class="tokens" open=${showsTokens} onToggle=${(event) => this.setState({ showsTokens: event.currentTarget.open })}>
        <summary title="Tokens by step">${summaryOf(answer)}</summary>
        ${showsTokens &&
        html`<${Numbers} answer=${answer} />
          <${Legend} />
          <${Strip} steps=${answer.steps} label="Tokens by step" />`}
      </details>`}
      ${!isRunning(answer) &&
      html`<div class="actions">
        <${Versions} ...${{ id, ids, isBusy }} show=${actions.showVersion} />
        ${answer.text && navigator.clipboard && html`<button type="button" onClick=${this.copy}>${isCopied ? "Copied" : "Copy"}</button>`}
        <button type="button" disabled=${isBusy} onClick=${() => actions.retry(id)}>Retry</button>
        ${canCompare(answer) &&
        html`<button type="button" class="compare" disabled=${isBusy} onClick=${() => actions.compare(id)}>Compare without drafts</button>`}
      </div>`}
      ${comparison && html`<${ComparisonView} answer=${answer} plain=${comparison} close=${() => actions.endComparison(id)} />`}
    </article>`;
  }
}

function canCompare(answer) {
  return [DONE, STOPPED, LOST].includes(answer.status) && answer.steps.length > 0 && !isPlain(answer.fields);
}

// Why an answer ended before the model's own end.
function Ending({ answer }) {
  const { status, error, finishReason, fields } = answer;
  if (status === STOPPED) return html`<p class="note">Stopped.</p>`;
  if (status === DONE && finishReason === "length") {
    const isLimited = numbersOf(answer).numTokens >= fields.max_tokens;
    const limit = `after ${fields.max_tokens} tokens: raise Max tokens in the settings for more`;
    return html`<p class="note">Cut ${isLimited ? limit : "where the context is full"}.</p>`;
  }
  if (status !== LOST && status !== FAILED) return null;
  const way = status === LOST ? "Is it running? Then retry." : "Change what is wrong, then retry.";
  const what = status === LOST ? `The connection was lost: ${error}.` : `The server refused: ${error}.`;
  return html`<p class="fault" role="alert">${what} ${way}</p>`;
}

function Numbers({ answer }) {
  const { numTokens, numSteps, drafted, accepted, meanAcceptanceLength } = numbersOf(answer);
  const shown = [
    ["mean acceptance length", meanAcceptanceLength.toFixed(2)],
    ["drafts accepted", `${accepted} of ${drafted}`],
    ["tokens", numTokens],
    ["steps", numSteps],
    ["seed", answer.fields.seed],
  ];
  if (answer.status === STREAMING) shown.pop();
  return html`<dl class="numbers">
    ${shown.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}
