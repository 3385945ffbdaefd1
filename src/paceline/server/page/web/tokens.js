// How tokens look: a colour and an underline for where they came from, so that the colour is not needed.
import { html } from "./html.js";
import { spelled } from "./answer.js";

const ORIGINS = {
  accepted: "accepted: drafted, and what the model itself chose",
  bonus: "bonus: the model's own token of a step with a draft",
  plain: "plain: the model's own token of a step without a draft",
};

export function Token({ token }) {
  return html`<span class="token ${token.origin}" title="${token.origin}, id ${token.id}">${spelled(token.text)}</span>`;
}

export function Legend() {
  return html`<ul class="legend" aria-label="Where tokens came from">
    ${Object.entries(ORIGINS).map(
      ([name, meaning]) => html`<li key=${name} title=${meaning}><span class="token ${name}">${name}</span></li>`,
    )}
  </ul>`;
}

// The same with what the words mean.
export function LongLegend() {
  return html`<dl class="long-legend">
    ${Object.entries(ORIGINS).map(([name, meaning]) => {
      const [, rest] = meaning.split(": ");
      return html`<div key=${name}><dt><span class="token ${name}">${name}</span></dt><dd>${rest}</dd></div>`;
    })}
  </dl>`;
}
