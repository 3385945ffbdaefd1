// Where the next message is typed. Enter sends it, Shift+Enter begins a line.
import { Component, html } from "./html.js";

export class Composer extends Component {
  constructor() {
    super();
    this.state = { text: "" };
  }

  componentDidMount() {
    this.props.field.current.focus();
  }

  send = () => {
    const text = this.state.text.trim();
    if (!text || this.props.isBusy) return;
    this.setState({ text: "" });
    this.props.send(text);
  };

  byKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.send();
    }
  };

  render({ field, isBusy, stop }, { text }) {
    return html`<div class="composer">
      <label class="visually-hidden" for="message">Message</label>
      <textarea
        id="message"
        ref=${field}
        rows="1"
        placeholder="Message"
        value=${text}
        onInput=${(event) => this.setState({ text: event.currentTarget.value })}
        onKeyDown=${this.byKey}
      />
      ${isBusy
        ? html`<button type="button" class="primary" onClick=${stop}>Stop</button>`
        : html`<button type="button" class="primary" disabled=${!text.trim()} onClick=${this.send}>Send</button>`}
    </div>`;
  }
}
