// The top of the page: whose answers these are, light or dark, and the way to the settings.
import { html } from "./html.js";

export const THEMES = ["system", "light", "dark"];

export function Header({ model, theme, changeTheme, showsSettings, toggleSettings, clear, canClear }) {
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  return html`<header class="top">
    <a class="skip" href="#message">Skip to the message</a>
    <h1>paceline</h1>
    <p class="model">${model ? model.id : ""}</p>
    <div class="actions">
      <button type="button" disabled=${!canClear} onClick=${clear}>New chat</button>
      <button type="button" aria-label="Theme: ${theme}, change to ${next}" title="Theme: ${theme}" onClick=${() => changeTheme(next)}>
        <span aria-hidden="true">${{ system: "◐", light: "☀", dark: "☾" }[theme]}</span>
      </button>
      <button type="button" aria-expanded=${String(showsSettings)} aria-controls="settings" onClick=${toggleSettings}>Settings</button>
    </div>
  </header>`;
}
