// Components are written as tagged templates: html`<p>${text}</p>`. What stands in ${} is text, never markup.
import { h } from "./vendor/preact.mjs";
import htm from "./vendor/htm.mjs";

export { Component, createRef, render } from "./vendor/preact.mjs";
export const html = htm.bind(h);
