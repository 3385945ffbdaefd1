// A column at the side of the conversation; on a narrow screen it covers it. Escape closes it where it covers.
import { html } from "./html.js";

export function Panel({ id, title, close, children }) {
  return html`<section id=${id} class="panel" aria-label=${title}>
    <header>
      <h2>${title}</h2>
      <button type="button" class="quiet" aria-label="Close ${title.toLowerCase()}" onClick=${close}>✕</button>
    </header>
    ${children}
  </section>`;
}
