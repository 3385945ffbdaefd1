// The page: its state, and what happens in it. Everything that is shown is made of this state.
import { servedModels } from "./api.js";
import { DONE, FAILED, STOPPED, newAnswer, numbersOf, tokensOf } from "./answer.js";
import { ChatList } from "./chat_list.js";
import { deleteChats, listChats, loadChat, saveChat } from "./chats.js";
import { Chat } from "./chat_view.js";
import { EMPTY, branchOf, messagesOf, newId, nodeOf, withAnswer, withChange, withMessage, withShown } from "./conversation.js";
import { generate } from "./generation.js";
import { Header } from "./header.js";
import { Component, createRef, html, render } from "./html.js";
import { CHAT, KEY, keep, keepPreferences, kept, keptPreferences } from "./kept.js";
import { keepForOffline } from "./offline.js";
import { DEFAULTS, chatFields, withoutDrafts } from "./request.js";
import { SettingsPanel } from "./settings_panel.js";

const COVERS = matchMedia("(max-width: 59.99rem)"); // a panel covers the conversation
const BOTH = matchMedia("(min-width: 75rem)"); // there is room for both panels
const KEEP_AFTER_MS = 300;
const KEEP_RUNNING_AFTER_MS = 2000; // all of a chat is written, while its answer grows

class App extends Component {
  constructor() {
    super();
    const preferences = keptPreferences();
    this.state = {
      models: [],
      asksForKey: kept(KEY) !== "",
      key: kept(KEY),
      preferences,
      settings: { ...DEFAULTS, ...preferences.settings },
      panels: { chats: BOTH.matches, settings: false },
      chat: newChat(),
      list: [], // of the chats that are kept
      running: null, // what stops the answer that is being made
      notice: "", // for screen readers
      fault: "",
      keepFault: "",
    };
    this.messageField = createRef();
    this.keepTimer = null;
    const { send, edit, retry, compare, endComparison, showVersion, stop } = this;
    this.actions = { send, edit, retry, compare, endComparison, showVersion, stop };
  }

  componentDidMount() {
    window.addEventListener("keydown", this.byKey);
    document.addEventListener("visibilitychange", () => document.hidden && this.keepNow());
    COVERS.addEventListener("change", () => this.forceUpdate());
    this.checkKey();
    if (kept(CHAT)) this.openChat(kept(CHAT));
    this.listChats();
    keepForOffline();
  }

  byKey = (event) => {
    const withControl = event.ctrlKey || event.metaKey;
    if (withControl && event.key === "k") this.showPanel("chats", true);
    else if (withControl && event.shiftKey && event.key.toLowerCase() === "o") this.startChat();
    else if (event.key === "Escape" && !event.defaultPrevented) {
      const name = ["settings", "chats"].find((panel) => this.state.panels[panel]);
      if (!name || (name === "chats" && !COVERS.matches)) return;
      this.showPanel(name, false);
    } else return;
    event.preventDefault();
  };

  // Show or hide a panel; the focus goes into it or back to the button that showed it.
  showPanel = (name, isShown) => {
    const others = BOTH.matches || !isShown ? this.state.panels : { chats: false, settings: false };
    this.setState({ panels: { ...others, [name]: isShown } }, () => {
      document.querySelector(isShown ? `#${name} :is(input, textarea, select)` : `[aria-controls=${name}]`)?.focus();
    });
    if (isShown && name === "chats") this.listChats();
  };

  checkKey = async () => {
    try {
      const models = await servedModels(this.state.key);
      const notice = this.state.models.length ? this.state.notice : `${models[0].id} is ready.`;
      this.setState({ models, fault: "", notice });
    } catch (error) {
      const asksForKey = this.state.asksForKey || error.status === 401;
      const fault = error.status === 401 ? "This server asks for an API key: enter it in the settings." : `${error.message}.`;
      this.setState({ asksForKey, fault });
      if (asksForKey) this.showPanel("settings", true);
    }
  };

  changeKey = (key) => {
    keep(KEY, key);
    this.setState({ key });
  };

  changePreferences = (change, notice = "") => {
    const preferences = { ...this.state.preferences, ...change };
    keepPreferences(preferences);
    this.setState({ preferences, notice });
  };

  changeSettings = (change) => {
    const settings = { ...this.state.settings, ...change };
    this.setState({ settings });
    this.changePreferences({ settings });
  };

  // chats

  changeChat(change) {
    this.setState(({ chat }) => ({ chat: { ...chat, ...change(chat) } }));
    this.keepTimer ??= setTimeout(this.keep, this.state.running ? KEEP_RUNNING_AFTER_MS : KEEP_AFTER_MS);
  }

  keepNow() {
    if (this.keepTimer !== null) this.keep();
  }

  keep = async () => {
    clearTimeout(this.keepTimer);
    this.keepTimer = null;
    const { chat, settings, preferences } = this.state;
    if (!preferences.keepsChats || chat.nodes.length === 0) return;
    keep(CHAT, chat.id);
    await this.withChats(() => saveChat({ ...chat, settings }));
    this.listChats();
  };

  // Do what needs the chats that are kept; where a browser refuses, the page goes on without them.
  async withChats(work) {
    try {
      const result = await work();
      if (this.state.keepFault) this.setState({ keepFault: "" });
      return result;
    } catch (error) {
      this.setState({ keepFault: `Chats are not kept: ${error.message || error.name}` });
      return undefined;
    }
  }

  listChats = async () => {
    this.setState({ list: (await this.withChats(listChats)) ?? [] });
  };

  openChat = async (id) => {
    const chat = await this.withChats(() => loadChat(id));
    if (!chat || this.state.running) return;
    const { settings, ...rest } = chat;
    this.keepNow();
    keep(CHAT, id);
    this.setState({ chat: rest, settings: { ...DEFAULTS, ...settings }, notice: "The chat is open." });
    this.closeCover();
  };

  startChat = () => {
    if (this.state.running) return;
    this.keepNow();
    keep(CHAT, "");
    this.setState({ chat: newChat(), notice: "The conversation is empty." });
    this.closeCover();
    this.messageField.current.focus();
  };

  closeCover() {
    if (COVERS.matches) this.setState({ panels: { chats: false, settings: false } });
  }

  // Delete one chat, or without an id all of them.
  remove = async (id = null) => {
    if (id === null || id === this.state.chat.id) this.startChat();
    await this.withChats(() => deleteChats(id));
    this.listChats();
  };

  // answers; `send` and `edit` return whether the message was taken

  send = (message) => this.answer(() => withMessage(this.state.chat, message));

  edit = (id, message) => this.answer(() => withMessage(this.state.chat, message, nodeOf(this.state.chat, id).parent));

  retry = (id) => this.answer(() => ({ ...this.state.chat, leaf: nodeOf(this.state.chat, id).parent }));

  stop = () => this.state.running.abort();

  showVersion = (id) => this.changeChat((chat) => withShown(chat, id));

  endComparison = (id) => this.changeChat((chat) => withChange(chat, id, { comparison: null }));

  // Answer the conversation that `changed` returns.
  answer(changed) {
    const { models, settings } = this.state;
    let answer;
    try {
      const model = chosenModel(models, settings);
      answer = newAnswer(chatFields(model, settings), settings.system, model?.hasTemplate ?? true);
    } catch (error) {
      this.setState({ fault: `${error.message}.` });
      return false;
    }
    const asked = changed();
    const begun = withAnswer(asked, answer);
    this.setState({ fault: "" });
    this.changeChat(() => begun);
    this.messageField.current.focus(); // what was pressed is gone
    const show = (answer) => this.changeChat((chat) => withChange(chat, begun.leaf, { answer }));
    this.run(answer, messagesOf(branchOf(asked), answer.system), show);
    return true;
  }

  // The same once more, without drafts; an answer that was cut is compared as far as it goes.
  compare = (id) => {
    const { answer, parent } = nodeOf(this.state.chat, id);
    const fields = withoutDrafts(answer.fields, answer.status === DONE ? null : tokensOf(answer).length);
    const plain = newAnswer(fields, answer.system, answer.isChat);
    const messages = messagesOf(branchOf({ ...this.state.chat, leaf: parent }), answer.system);
    this.run(plain, messages, (comparison) => this.changeChat((chat) => withChange(chat, id, { comparison })));
  };

  async run(begun, messages, show) {
    const running = new AbortController();
    this.setState({ running, notice: "Answering." });
    const answer = await generate(begun, messages, this.state.key, running.signal, show);
    this.setState({ running: null, notice: announced(answer) }, this.keep);
    const isKnown = chosenModel(this.state.models, this.state.settings)?.drafters.length > 0; // else it may have been loaded now
    if (answer.status === FAILED || !isKnown) this.checkKey();
  }

  render(_, { models, asksForKey, key, preferences, settings, panels, chat, list, running, notice, fault, keepFault }) {
    const isBusy = running !== null;
    const model = chosenModel(models, settings);
    const isCovered = COVERS.matches && (panels.chats || panels.settings);
    return html`<div class="app" data-theme=${preferences.theme}>
      <${Header}
        model=${model}
        theme=${preferences.theme}
        changeTheme=${(theme) => this.changePreferences({ theme }, `Theme: ${theme}.`)}
        panels=${panels}
        showPanel=${this.showPanel}
        startChat=${this.startChat}
        canStart=${chat.nodes.length > 0 && !isBusy}
      />
      <div class="columns">
        ${panels.chats &&
        html`<${ChatList}
          list=${list}
          chat=${{ ...chat, settings }}
          isBusy=${isBusy}
          keepsChats=${preferences.keepsChats}
          open=${this.openChat}
          remove=${this.remove}
          close=${() => this.showPanel("chats", false)}
        />`}
        <main inert=${isCovered}>
          ${fault && html`<p class="fault" role="alert">${fault} <button type="button" onClick=${this.checkKey}>Try again</button></p>`}
          ${keepFault && html`<p class="fault" role="alert">${keepFault}.</p>`}
          <${Chat}
            chat=${chat}
            model=${model}
            isChat=${model?.hasTemplate ?? true}
            isBusy=${isBusy}
            opensTokens=${preferences.opensTokens}
            actions=${this.actions}
            messageField=${this.messageField}
          />
        </main>
        ${panels.settings &&
        html`<${SettingsPanel}
          models=${models}
          model=${model}
          settings=${settings}
          change=${this.changeSettings}
          preferences=${preferences}
          changePreferences=${this.changePreferences}
          asksForKey=${asksForKey}
          apiKey=${key}
          changeKey=${this.changeKey}
          checkKey=${this.checkKey}
          close=${() => this.showPanel("settings", false)}
        />`}
      </div>
      <p class="visually-hidden" role="status">${notice}</p>
    </div>`;
  }
}

// The model that the settings name, where it is served.
function chosenModel(models, settings) {
  return models.find(({ id }) => id === settings.model) ?? models[0] ?? null;
}

function newChat() {
  return { id: newId(), createdAt: Date.now(), ...EMPTY };
}

function announced(answer) {
  const { numTokens } = numbersOf(answer);
  return answer.status === DONE ? `The answer is there: ${numTokens} tokens.` : answer.status === STOPPED ? "Stopped." : "";
}

render(html`<${App} />`, document.getElementById("app"));
