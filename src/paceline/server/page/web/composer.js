// Where the next message is typed. Enter sends it, Shift+Enter begins a line. Text files are chosen or dropped here.
import { readTextFile, sizeOf } from "./attachments.js";
import { Component, createRef, html } from "./html.js";

export class Composer extends Component {
  constructor() {
    super();
    this.state = { text: "", files: [], fault: "" };
    this.chooser = createRef();
  }

  componentDidMount() {
    this.props.field.current.focus();
  }

  canSend() {
    return !this.props.isBusy && (this.state.text.trim() !== "" || this.state.files.length > 0);
  }

  send = () => {
    const { text, files } = this.state;
    if (this.canSend() && this.props.send({ text: text.trim(), files })) this.setState({ text: "", files: [], fault: "" });
  };

  byKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.send();
    }
  };

  attach = async (chosen) => {
    const read = await Promise.allSettled([...chosen].map(readTextFile));
    const files = read.filter(({ status }) => status === "fulfilled").map(({ value }) => value);
    const faults = read.filter(({ status }) => status === "rejected").map(({ reason }) => reason.message);
    this.setState((state) => ({ files: [...state.files, ...files], fault: faults.join("; ") }));
    this.props.field.current.focus();
  };

  drop = (event) => {
    if (event.dataTransfer.files.length === 0) return;
    event.preventDefault();
    this.attach(event.dataTransfer.files);
  };

  remove = (file) => {
    this.setState(({ files }) => ({ files: files.filter((other) => other !== file) }));
    this.props.field.current.focus();
  };

  choose = (event) => {
    this.attach(event.currentTarget.files);
    event.currentTarget.value = ""; // the same file may be chosen again
  };

  render({ field, isBusy, isChat, stop }, { text, files, fault }) {
    return html`<div class="composer" onDragOver=${(event) => event.preventDefault()} onDrop=${this.drop}>
      ${fault && html`<p class="fault" role="alert">Not attached: ${fault}.</p>`}
      ${files.length > 0 &&
      html`<ul class="files" aria-label="Attached files">
        ${files.map(
          (file) => html`<li>
            ${file.name} <span class="note">${sizeOf(new Blob([file.text]).size)}</span>
            <button type="button" class="quiet" aria-label="Remove ${file.name}" onClick=${() => this.remove(file)}>✕</button>
          </li>`,
        )}
      </ul>`}
      <input type="file" multiple hidden aria-label="Text files" ref=${this.chooser} onChange=${this.choose} />
      <button type="button" aria-label="Attach text files" title="Attach text files" onClick=${() => this.chooser.current.click()}>
        <svg viewBox="0 0 24 24" aria-hidden="true"><path d="M20 11.5 12 19.5a5 5 0 0 1-7-7l8.5-8.5a3.4 3.4 0 0 1 4.8 4.8L10 17a1.7 1.7 0 0 1-2.4-2.4l7.4-7.4" /></svg>
      </button>
      <label class="visually-hidden" for="message">Message</label>
      <textarea
        id="message"
        ref=${field}
        rows="1"
        placeholder=${isChat ? "Message" : "Text to continue"}
        value=${text}
        onInput=${(event) => this.setState({ text: event.currentTarget.value })}
        onKeyDown=${this.byKey}
      />
      ${isBusy
        ? html`<button type="button" class="primary" onClick=${stop}>Stop</button>`
        : html`<button type="button" class="primary" disabled=${!this.canSend()} onClick=${this.send}>Send</button>`}
    </div>`;
  }
}
