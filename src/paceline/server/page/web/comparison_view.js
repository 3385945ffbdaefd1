// The same prompt and seed with and without drafts, side by side: a race of two answers whose token ids are compared one by one. While
// the plain answer is made, the drafted one is shown again at the pace at which it came; both clocks begin with the first token.
import { Component, createRef, html } from "./html.js";
import { FAILED, LOST, STOPPED, firstDifference, isRunning, numbersOf, rateOf, spelled, tokensOf } from "./answer.js";
import { Strip } from "./strip.js";
import { Legend } from "./tokens.js";

const FRAME_MS = 50;
const PACES = { "Replay": 1, "10 × slower": 10 };

export class ComparisonView extends Component {
  constructor() {
    super();
    this.state = { elapsedMs: null, hasIds: false }; // null = the end is shown
    this.section = createRef();
  }

  componentDidMount() {
    this.section.current.scrollIntoView();
    if (isRunning(this.props.plain)) this.start(() => (this.props.plain.firstMs ? performance.now() - this.props.plain.firstMs : 0));
  }

  componentDidUpdate({ plain }) {
    if (!isRunning(plain)) return;
    if (isRunning(this.props.plain)) this.scrollTo();
    else this.stop(this.scrollTo); // all of both answers is shown then
  }

  scrollTo = () => {
    this.section.current?.scrollIntoView({ block: "nearest" }); // it has grown
  };

  componentWillUnmount() {
    clearInterval(this.timer);
  }

  start(clock) {
    clearInterval(this.timer);
    this.timer = setInterval(() => {
      const elapsedMs = clock();
      const isOver = [this.props.answer, this.props.plain].every(({ steps }) => (steps.at(-1)?.atMs ?? 0) <= elapsedMs);
      if (isOver && !isRunning(this.props.plain)) this.stop();
      else this.setState({ elapsedMs });
    }, FRAME_MS);
  }

  stop(afterwards) {
    clearInterval(this.timer);
    this.setState({ elapsedMs: null }, afterwards);
  }

  replay = (times) => {
    const began = performance.now();
    this.start(() => (performance.now() - began) / times);
    this.setState({ elapsedMs: 0 });
  };

  render({ answer, plain, close }, { elapsedMs, hasIds }) {
    const byServer = answer.stats !== null && plain.stats !== null; // one clock for both
    const lane = { elapsedMs, byServer, numExpected: tokensOf(answer).length };
    return html`<section class="comparison" aria-label="With and without drafts" ref=${this.section}>
      <header>
        <${Verdict} answer=${answer} plain=${plain} byServer=${byServer} />
        ${!isRunning(plain) &&
        html`<div class="actions">
          ${Object.entries(PACES).map(
            ([name, times]) => html`<button type="button" key=${name} onClick=${() => this.replay(times)}>${name}</button>`,
          )}
          <button type="button" aria-label="Close the comparison" onClick=${close}>✕</button>
        </div>`}
      </header>
      <div class="sides">
        <${Lane} name="With drafts" answer=${answer} ...${lane} />
        <${Lane} name="Without drafts" answer=${plain} ...${lane} />
      </div>
      <${Legend} />
      ${!isRunning(plain) &&
      html`<details class="ids" onToggle=${(event) => this.setState({ hasIds: event.currentTarget.open })}>
        <summary>The token ids, side by side</summary>
        ${hasIds && html`<${Ids} left=${tokensOf(answer)} right=${tokensOf(plain)} />`}
      </details>`}
    </section>`;
  }
}

// One answer as it was after `elapsedMs`; null = all of it.
function Lane({ name, answer, elapsedMs, byServer, numExpected }) {
  const steps = elapsedMs === null ? answer.steps : answer.steps.filter(({ atMs }) => atMs <= elapsedMs);
  const numTokens = steps.reduce((sum, step) => sum + step.tokens.length, 0);
  const isOver = steps.length === answer.steps.length && !isRunning(answer);
  const { decodeS, tokensPerS } = numbersOf(answer, byServer);
  const seconds = isOver ? decodeS : (elapsedMs ?? 0) / 1000;
  return html`<div class="lane" aria-busy=${String(!isOver)}>
    <h3>${name}</h3>
    <p class="clock">${seconds > 0 ? `${seconds.toFixed(isOver ? 3 : 1)} s` : "–"}</p>
    <progress max=${Math.max(numExpected, 1)} value=${numTokens} aria-label="${name}: tokens"></progress>
    <p class="note">${numTokens} tokens · ${steps.length} steps${isOver && tokensPerS ? ` · ${rateOf(tokensPerS)} tokens/s` : ""}</p>
    <${Strip} steps=${steps} label="Tokens ${name.toLowerCase()}" follows />
  </div>`;
}

function Verdict({ answer, plain, byServer }) {
  const difference = firstDifference(answer, plain);
  const numPlain = tokensOf(plain).length;
  if (isRunning(plain) && (!difference || difference.index >= numPlain)) {
    const soFar = numPlain > 0 ? `${numPlain} token ids, all the same so far` : "";
    return html`<p class="verdict">Decoding the same without drafts … ${soFar}</p>`;
  }
  if (plain.status === FAILED || plain.status === LOST) return html`<p class="fault" role="alert">Not compared: ${plain.error}.</p>`;
  if (plain.status === STOPPED) return html`<p class="verdict">Not compared: it was stopped.</p>`;
  if (!difference) {
    const [drafted, without] = [answer, plain].map((one) => numbersOf(one, byServer));
    const speedup = drafted.decodeS > 0 && without.decodeS > 0 ? (without.decodeS / drafted.decodeS).toFixed(2) : null;
    return html`<p class="verdict same">
      <strong>✓ The same ${drafted.numTokens} token ids</strong>, compared one by one.
      ${speedup && html` <span class="speedup">${speedup} × the speed</span>`}
    </p>`;
  }
  const { index, left, right } = difference;
  return html`<p class="verdict different">
    <strong>✕ Token ${index + 1} differs:</strong> ${named(left)} with drafts, ${named(right)} without. ${reason(plain)}
  </p>`;
}

function named(token) {
  return token ? html`<code>${spelled(token.text)}</code> (id ${token.id})` : "none";
}

// Where ids may differ without a fault.
function reason({ stats }) {
  if (stats?.acceptance === "rejection") return "This server keeps drafts by rejection: the distribution is the same, the text is not.";
  if (stats && stats.numerics !== "exact") return "Numerics is fast here: near-ties may fall otherwise.";
  return "";
}

// Every token of both, one a line.
function Ids({ left, right }) {
  const rows = Array.from({ length: Math.max(left.length, right.length) }, (_, index) => [left[index], right[index]]);
  return html`<div class="scrolls" role="group" tabindex="0" aria-label="Token ids of both">
    <table>
      <thead>
        <tr>${["#", "text", "with drafts", "without", "same"].map((name) => html`<th scope="col" key=${name}>${name}</th>`)}</tr>
      </thead>
      <tbody>
        ${rows.map(
          ([ours, theirs], index) => html`<tr key=${index}>
            <th scope="row">${index + 1}</th>
            <td><code>${spelled((ours ?? theirs).text)}</code></td>
            <td>${ours?.id ?? "–"}</td>
            <td>${theirs?.id ?? "–"}</td>
            <td>${ours?.id === theirs?.id ? "✓" : "✕"}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}
