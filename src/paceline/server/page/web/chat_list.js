// The chats that are kept in this browser: search, open, delete, and export of the one that is open.
import { jsonOf, markdownOf } from "./chats.js";
import { titleOf } from "./conversation.js";
import { Component, createRef, html } from "./html.js";
import { Panel } from "./panel.js";

const ALL = "all";

export class ChatList extends Component {
  constructor() {
    super();
    this.state = { search: "", marked: null }; // `marked` is the chat whose deletion is to be confirmed, or ALL
    this.searchField = createRef();
  }

  mark = (id) => this.setState({ marked: id });

  cancel = () => {
    const { marked } = this.state;
    this.setState({ marked: null }, () => document.querySelector(`#chats [data-deletes="${marked}"]`).focus());
  };

  remove = () => {
    const { marked } = this.state;
    this.setState({ marked: null }, () => {
      this.searchField.current.focus(); // what was pressed is gone
      this.props.remove(marked === ALL ? null : marked);
    });
  };

  render({ list, chat, isBusy, keepsChats, open, close }, { search, marked }) {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const found = withOpen(list, chat).filter(({ title, text }) => words.every((word) => `${title}\n${text}`.toLowerCase().includes(word)));
    const { mark, cancel, remove } = this;
    return html`<${Panel} id="chats" title="Chats" close=${close}>
      <input
        type="search"
        ref=${this.searchField}
        aria-label="Search chats"
        placeholder="Search"
        value=${search}
        onInput=${(event) => this.setState({ search: event.currentTarget.value })}
      />
      ${found.length > 0 &&
      html`<ul class="chats">
        ${found.map((entry) => {
          const own = { entry, chat: entry.id === chat.id ? chat : null, isMarked: marked === entry.id };
          return html`<${Item} key=${entry.id} ...${{ ...own, isBusy, open, mark, cancel, remove }} />`;
        })}
      </ul>`}
      ${found.length === 0 && html`<p class="note">${words.length ? "No chat has these words." : "No chats yet."}</p>`}
      <p class="note">${keepsChats ? "Kept in this browser only." : "New chats are not kept: see the settings."}</p>
      ${list.length > 0 &&
      (marked === ALL
        ? html`<${Confirm} question="Delete all chats?" ...${{ isBusy, cancel, remove }} />`
        : html`<button type="button" class="quiet" data-deletes=${ALL} disabled=${isBusy} onClick=${() => mark(ALL)}>Delete all</button>`)}
    <//>`;
  }
}

// The list with the chat that is open, which may not be kept.
function withOpen(list, chat) {
  if (chat.nodes.length === 0 || list.some(({ id }) => id === chat.id)) return list;
  return [{ id: chat.id, title: titleOf(chat), updatedAt: Date.now(), text: "" }, ...list];
}

function Item({ entry: { id, title, updatedAt }, chat, isBusy, isMarked, open, mark, cancel, remove }) {
  if (isMarked) return html`<li><${Confirm} question="Delete “${title}”?" ...${{ isBusy, cancel, remove }} /></li>`;
  const deletion = { "aria-label": `Delete “${title}”`, "data-deletes": id };
  return html`<li class=${chat ? "current" : ""}>
    <button type="button" class="open" aria-current=${chat ? "true" : undefined} disabled=${isBusy} onClick=${() => open(id)}>
      <span class="title">${title}</span>
      <time class="note">${whenOf(updatedAt)}</time>
    </button>
    <button type="button" class="quiet" ...${deletion} disabled=${isBusy} onClick=${() => mark(id)}>✕</button>
    ${chat &&
    html`<div class="actions export" role="group" aria-label="Export">
      <span class="note" aria-hidden="true">Export</span>
      <${Export} chat=${chat} name="Markdown" ending="md" type="text/markdown" make=${markdownOf} />
      <${Export} chat=${chat} name="JSON" ending="json" type="application/json" make=${jsonOf} />
    </div>`}
  </li>`;
}

// The time of a chat of today, the date of an older one.
function whenOf(ms) {
  const date = new Date(ms);
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? date.toLocaleTimeString([], { timeStyle: "short" }) : date.toLocaleDateString([], { dateStyle: "medium" });
}

class Confirm extends Component {
  constructor() {
    super();
    this.button = createRef();
  }

  componentDidMount() {
    this.button.current.focus();
  }

  byKey = (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault(); // the panel stays open
    this.props.cancel();
  };

  render({ question, isBusy, cancel, remove }) {
    return html`<div class="confirm" role="group" aria-label=${question} onKeyDown=${this.byKey}>
      <p>${question}</p>
      <div class="actions">
        <button type="button" ref=${this.button} onClick=${cancel}>Cancel</button>
        <button type="button" class="danger" disabled=${isBusy} onClick=${remove}>Delete</button>
      </div>
    </div>`;
  }
}

// Saves a chat to a file.
class Export extends Component {
  constructor() {
    super();
    this.link = createRef();
  }

  save = () => {
    const { chat, ending, type, make } = this.props;
    const address = URL.createObjectURL(new Blob([make(chat)], { type }));
    const name = titleOf(chat).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
    Object.assign(this.link.current, { href: address, download: `${name || "chat"}.${ending}` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000); // a browser may read it later than now
  };

  render({ name }) {
    return html`<button type="button" aria-label="Export as ${name}" onClick=${this.save}>${name}</button><a hidden ref=${this.link}></a>`;
  }
}
