// What the person said: shown as it was typed, to be changed and sent again.
import { Component, createRef, html } from "./html.js";

export class MessageView extends Component {
  constructor() {
    super();
    this.state = { draft: null };
    this.field = createRef();
    this.button = createRef();
  }

  edit = () => {
    this.setState({ draft: this.props.turn.text }, () => this.field.current.focus());
  };

  leave = () => {
    this.setState({ draft: null }, () => this.button.current?.focus());
  };

  send = () => {
    const text = this.state.draft.trim();
    if (text) this.props.actions.edit(this.props.turn.id, text);
  };

  byKey = (event) => {
    if (event.key === "Escape") this.leave();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.send();
    }
  };

  render({ turn, isBusy }, { draft }) {
    return html`<article class="turn message" aria-label="Your message">
      <h2>You</h2>
      ${draft === null
        ? html`<p class="typed">${turn.text}</p>
            <div class="actions"><button type="button" ref=${this.button} disabled=${isBusy} onClick=${this.edit}>Edit</button></div>`
        : html`<textarea
              ref=${this.field}
              aria-label="Edit the message"
              rows="3"
              value=${draft}
              onInput=${(event) => this.setState({ draft: event.currentTarget.value })}
              onKeyDown=${this.byKey}
            />
            <div class="actions">
              <button type="button" class="primary" disabled=${isBusy || !draft.trim()} onClick=${this.send}>Send again</button>
              <button type="button" onClick=${this.leave}>Cancel</button>
            </div>`}
    </article>`;
  }
}
