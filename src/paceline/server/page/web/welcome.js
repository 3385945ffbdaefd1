// What an empty page says.
import { html } from "./html.js";
import { LongLegend } from "./tokens.js";

// Short tasks for a model of any size: prose, code, and a text to copy, where drafts bring most.
const EXAMPLES = [
  "Explain in three sentences why the sky is blue.",
  "Write a Python function that adds two numbers.",
  "Plan a day in a city for a family with two children, as a table.",
  "Repeat this text word by word: The taxi to the airport leaves at nine. The taxi to the station leaves at ten.",
];

// Beginnings for a base model.
const BEGINNINGS = [
  "The sky is blue because",
  "def add(first, second):",
  "The taxi to the airport leaves at nine. The taxi to the station leaves at ten. The taxi to the airport leaves",
];

export function Welcome({ send, isBusy, isChat }) {
  return html`<section class="welcome" aria-label="What this page shows">
    <p class="lead">Faster, without changing a token.</p>
    <p>A drafter drafts tokens ahead, and the model verifies them in one pass. Each token of an answer shows where it came from:</p>
    <${LongLegend} />
    ${!isChat && html`<p>This model has no chat template: it continues the text that it is given.</p>`}
    <ul class="examples" aria-label="Examples">
      ${(isChat ? EXAMPLES : BEGINNINGS).map(
        (text) => html`<li key=${text}><button type="button" disabled=${isBusy} onClick=${() => send({ text })}>${text}</button></li>`,
      )}
    </ul>
  </section>`;
}
