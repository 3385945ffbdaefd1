// What the person said: shown as it was typed, to be changed and sent again as another version.
import { sizeOf } from "./attachments.js";
import { Component, createRef, html } from "./html.js";
import { Versions } from "./versions.js";

export class MessageView extends Component {
  constructor() {
    super();
    this.state = { draft: null };
    this.field = createRef();
    this.button = createRef();
  }

  edit = () => {
    this.setState({ draft: this.props.node.text }, () => this.field.current.focus());
  };

  leave = () => {
    this.setState({ draft: null }, () => this.button.current?.focus());
  };

  canSend() {
    return this.state.draft.trim() !== "" || this.props.node.files.length > 0;
  }

  send = () => {
    const { node, actions } = this.props;
    if (this.canSend()) actions.edit(node.id, { text: this.state.draft.trim(), files: node.files });
  };

  byKey = (event) => {
    if (event.key !== "Escape" && (event.key !== "Enter" || event.shiftKey || event.isComposing)) return;
    event.preventDefault();
    if (event.key === "Escape") this.leave();
    else if (!this.props.isBusy) this.send();
  };

  render({ node, ids, isBusy, actions }, { draft }) {
    return html`<article class="turn message" aria-label="Your message">
      <h2>You</h2>
      ${draft === null
        ? html`${node.text && html`<p class="typed">${node.text}</p>`}
            <${Files} files=${node.files} />
            <div class="actions">
              <${Versions} id=${node.id} ...${{ ids, isBusy }} show=${actions.showVersion} />
              <button type="button" ref=${this.button} disabled=${isBusy} onClick=${this.edit}>Edit</button>
            </div>`
        : html`<textarea
              ref=${this.field}
              aria-label="Edit the message"
              rows="3"
              value=${draft}
              onInput=${(event) => this.setState({ draft: event.currentTarget.value })}
              onKeyDown=${this.byKey}
            />
            <${Files} files=${node.files} />
            <div class="actions">
              <button type="button" class="primary" disabled=${isBusy || !this.canSend()} onClick=${this.send}>Send again</button>
              <button type="button" onClick=${this.leave}>Cancel</button>
            </div>`}
    </article>`;
  }
}

function Files({ files }) {
  return files.map(
    (file) => html`<details class="file" key=${file.name}>
      <summary>${file.name} <span class="note">${sizeOf(new Blob([file.text]).size)}</span></summary>
      <pre class="scrolls" tabindex="0" aria-label=${file.name}>${file.text}</pre>
    </details>`,
  );
}
