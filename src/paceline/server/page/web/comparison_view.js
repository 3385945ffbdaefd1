// The same prompt and seed with and without drafts, side by side: the tokens are the same, the times are not.
import { html } from "./html.js";
import { FAILED, LOST, STOPPED, firstDifference, isRunning, numbersOf, spelled } from "./answer.js";
import { Strip } from "./strip.js";
import { Legend } from "./tokens.js";

export function ComparisonView({ answer, plain }) {
  return html`<section class="comparison" aria-label="With and without drafts">
    <${Verdict} answer=${answer} plain=${plain} />
    <div class="scrolls" role="group" tabindex="0" aria-label="Numbers of both"><${Table} answer=${answer} plain=${plain} /></div>
    <${Legend} />
    <div class="sides">
      <div>
        <h3>With drafts</h3>
        <${Strip} steps=${answer.steps} label="Tokens with drafts" />
      </div>
      <div aria-busy=${String(isRunning(plain))}>
        <h3>Without drafts</h3>
        <${Strip} steps=${plain.steps} label="Tokens without drafts" />
      </div>
    </div>
  </section>`;
}

function Verdict({ answer, plain }) {
  if (isRunning(plain)) return html`<p class="verdict">Decoding the same without drafts …</p>`;
  if (plain.status === FAILED || plain.status === LOST) return html`<p class="fault" role="alert">Not compared: ${plain.error}.</p>`;
  if (plain.status === STOPPED) return html`<p class="verdict">Not compared: it was stopped.</p>`;
  const difference = firstDifference(answer, plain);
  if (!difference) {
    const { numTokens } = numbersOf(answer);
    return html`<p class="verdict same"><strong>✓ The same ${numTokens} token ids</strong>, compared one by one.</p>`;
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
  if (stats.acceptance === "rejection") return "This server keeps drafts by rejection: the distribution is the same, the text is not.";
  if (stats.numerics !== "exact") return "Numerics is fast here: near-ties may fall otherwise.";
  return "";
}

function Table({ answer, plain }) {
  const byServer = answer.stats !== null && plain.stats !== null; // one clock for both
  const [with_, without] = [answer, plain].map((one) => numbersOf(one, byServer));
  const isOver = !isRunning(plain) && with_.decodeS > 0 && without.decodeS > 0;
  return html`<table>
    <thead>
      <tr><th scope="col">Decoding</th><th scope="col">seconds</th><th scope="col">tokens/s</th><th scope="col">steps</th></tr>
    </thead>
    <tbody>
      ${row("with drafts", with_)} ${row("without", without)}
    </tbody>
    ${isOver && html`<tfoot><tr><th scope="row">speedup</th><td colspan="3">${(without.decodeS / with_.decodeS).toFixed(2)} ×</td></tr></tfoot>`}
  </table>`;
}

function row(name, { decodeS, tokensPerS, numSteps }) {
  return html`<tr>
    <th scope="row">${name}</th>
    <td>${decodeS > 0 ? decodeS.toFixed(3) : "–"}</td>
    <td>${tokensPerS ? tokensPerS.toFixed(1) : "–"}</td>
    <td>${numSteps}</td>
  </tr>`;
}
