// The page: its state, and what happens in it. Everything that is shown is made of this state.
import { ApiError, chatEvents, servedModel } from "./api.js";
import { DONE, FAILED, LOST, STOPPED, isRunning, newAnswer, numbersOf, tokensOf, withEvent } from "./answer.js";
import { AnswerView } from "./answer_view.js";
import { Composer } from "./composer.js";
import { before, messagesOf, withAnswer, withChange, withEdited, withMessage } from "./conversation.js";
import { Header, THEMES } from "./header.js";
import { Component, createRef, html, render } from "./html.js";
import { keepKey, keepTheme, keptKey, keptTheme } from "./kept.js";
import { MessageView } from "./message_view.js";
import { DEFAULTS, chatFields, withoutDrafts } from "./request.js";
import { SettingsPanel } from "./settings_panel.js";
import { Welcome } from "./welcome.js";

const WIDE = matchMedia("(min-width: 60rem)");
const NEAR_END_PX = 120;
const SHOW_EVERY_MS = 80; // often enough to look live; the model may want this processor too

class App extends Component {
  constructor() {
    super();
    this.state = {
      model: null,
      asksForKey: keptKey() !== "",
      key: keptKey(),
      settings: DEFAULTS,
      showsSettings: WIDE.matches,
      theme: THEMES.includes(keptTheme()) ? keptTheme() : "system",
      turns: [],
      running: null, // what stops the answer that is being made
      notice: "", // what a screen reader is told
      fault: "",
    };
    this.messageField = createRef();
    this.actions = { edit: this.edit, retry: this.retry, compare: this.compare };
  }

  componentDidMount() {
    this.checkKey();
  }

  // Follow a growing answer where its end is in sight; who has scrolled up stays there.
  getSnapshotBeforeUpdate() {
    return window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - NEAR_END_PX;
  }

  componentDidUpdate(_, before, wasAtEnd) {
    if (wasAtEnd && this.state.running && before.turns !== this.state.turns) window.scrollTo(0, document.documentElement.scrollHeight);
  }

  checkKey = async () => {
    try {
      const model = await servedModel(this.state.key);
      this.setState({ model, fault: "", notice: `${model.id} is ready.` });
    } catch (error) {
      const asksForKey = this.state.asksForKey || error.status === 401;
      const fault = error.status === 401 ? "This server asks for an API key: enter it in the settings." : `${error.message}.`;
      this.setState({ asksForKey, fault, showsSettings: this.state.showsSettings || asksForKey });
    }
  };

  changeKey = (key) => {
    keepKey(key);
    this.setState({ key });
  };

  changeTheme = (theme) => {
    keepTheme(theme);
    this.setState({ theme, notice: `Theme: ${theme}.` });
  };

  send = (text) => this.answer(withMessage(this.state.turns, text));

  edit = (id, text) => this.answer(withEdited(this.state.turns, id, text));

  retry = (id) => this.answer(before(this.state.turns, id));

  stop = () => this.state.running.abort();

  // Answer the conversation so far.
  answer(turns) {
    const fields = chatFields(this.state.model?.id, messagesOf(turns), this.state.settings);
    const begun = withAnswer(turns, newAnswer(fields));
    const { id } = begun.at(-1);
    this.setState({ turns: begun });
    this.messageField.current.focus(); // what was pressed is gone
    this.run(newAnswer(fields), (answer) => this.setState(({ turns }) => ({ turns: withChange(turns, id, { answer }) })));
  }

  // The same once more, without drafts; an answer that was cut is compared as far as it goes.
  compare = (id) => {
    const { answer } = this.state.turns.find((turn) => turn.id === id);
    const plain = newAnswer(withoutDrafts(answer.fields, answer.status === DONE ? null : tokensOf(answer).length));
    this.run(plain, (comparison) => this.setState(({ turns }) => ({ turns: withChange(turns, id, { comparison }) })));
  };

  // Ask, and hand the growing answer to `show`, now and then.
  async run(answer, show) {
    const running = new AbortController();
    let timer = null;
    const showSoon = () => {
      timer ??= setTimeout(() => {
        timer = null;
        show(answer);
      }, SHOW_EVERY_MS);
    };
    this.setState({ running, notice: "Answering." });
    show(answer);
    try {
      for await (const event of chatEvents(answer.fields, this.state.key, running.signal)) {
        answer = withEvent(answer, event, performance.now());
        showSoon();
      }
      answer = { ...answer, status: DONE };
    } catch (error) {
      answer = { ...answer, ...ending(error) };
    }
    clearTimeout(timer);
    show(answer);
    this.setState({ running: null, notice: isRunning(answer) ? "" : announced(answer) });
    if (answer.status === FAILED) this.checkKey();
  }

  render(_, { model, asksForKey, key, settings, showsSettings, theme, turns, running, notice, fault }) {
    const isBusy = running !== null;
    return html`<div class="app" data-theme=${theme}>
      <${Header}
        model=${model}
        theme=${theme}
        changeTheme=${this.changeTheme}
        showsSettings=${showsSettings}
        toggleSettings=${() => this.setState({ showsSettings: !showsSettings })}
        clear=${() => this.setState({ turns: [], notice: "The conversation is empty." })}
        canClear=${turns.length > 0 && !isBusy}
      />
      <div class="columns">
        ${showsSettings &&
        html`<${SettingsPanel}
          model=${model}
          settings=${settings}
          change=${(change) => this.setState({ settings: { ...settings, ...change } })}
          asksForKey=${asksForKey}
          apiKey=${key}
          changeKey=${this.changeKey}
          checkKey=${this.checkKey}
        />`}
        <main>
          ${fault && html`<p class="fault" role="alert">${fault} <button type="button" onClick=${this.checkKey}>Try again</button></p>`}
          ${turns.length === 0 && html`<${Welcome} ask=${this.send} isBusy=${isBusy} />`}
          ${turns.map((turn) => {
            const View = turn.role === "user" ? MessageView : AnswerView;
            const name = turn.answer?.fields.model ?? model?.id ?? "Answer";
            return html`<${View} key=${turn.id} turn=${turn} isBusy=${isBusy} actions=${this.actions} model=${name} />`;
          })}
          <${Composer} field=${this.messageField} isBusy=${isBusy} send=${this.send} stop=${this.stop} />
        </main>
      </div>
      <p class="visually-hidden" role="status">${notice}</p>
    </div>`;
  }
}

function ending(error) {
  if (error.name === "AbortError") return { status: STOPPED };
  return { status: error instanceof ApiError ? FAILED : LOST, error: error.message };
}

function announced(answer) {
  const { numTokens } = numbersOf(answer);
  return answer.status === DONE ? `The answer is there: ${numTokens} tokens.` : answer.status === STOPPED ? "Stopped." : "";
}

render(html`<${App} />`, document.getElementById("app"));
