// What an empty page says.
import { html } from "./html.js";
import { LongLegend } from "./tokens.js";

const EXAMPLES = [
  "I need a taxi to the airport.",
  "Write a Python function that adds two numbers.",
  "I would like to book a table for two in Toronto tonight.",
];

export function Welcome({ ask, isBusy }) {
  return html`<section class="welcome" aria-label="What this page shows">
    <p class="lead">Faster, without changing a token.</p>
    <p>A drafter drafts tokens ahead, and the model verifies them in one pass. Each token of an answer shows where it came from:</p>
    <${LongLegend} />
    <ul class="examples" aria-label="Examples">
      ${EXAMPLES.map(
        (text) => html`<li key=${text}><button type="button" disabled=${isBusy} onClick=${() => ask(text)}>${text}</button></li>`,
      )}
    </ul>
  </section>`;
}
