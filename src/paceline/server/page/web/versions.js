// Which of its versions a message or an answer is, and the way to the others.
import { html } from "./html.js";

export function Versions({ id, ids, isBusy, show }) {
  if (ids.length < 2) return null;
  const place = ids.indexOf(id);
  const button = (label, sign, other) =>
    html`<button type="button" aria-label=${label} disabled=${isBusy || !other} onClick=${() => show(other)}>${sign}</button>`;
  return html`<span class="versions" role="group" aria-label="Versions">
    ${button("Previous version", "‹", ids[place - 1])}
    <span>${place + 1} / ${ids.length}</span>
    ${button("Next version", "›", ids[place + 1])}
  </span>`;
}
