// The top of the page: whose answers these are, and the way to the chats, to the settings and to light or dark.
import { html } from "./html.js";

const THEMES = { system: "◐", light: "☀", dark: "☾" };

export function Header({ model, theme, changeTheme, panels, showPanel, startChat, canStart }) {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(theme) + 1) % names.length];
  const toggle = (panel, sign, label) =>
    html`<button
      type="button"
      aria-label=${label}
      aria-expanded=${String(panels[panel])}
      aria-controls=${panel}
      onClick=${() => showPanel(panel, !panels[panel])}
    >
      <span aria-hidden="true">${sign}</span><span class="words">${label}</span>
    </button>`;
  return html`<header class="top">
    <a class="skip" href="#message">Skip to the message</a>
    ${toggle("chats", "☰", "Chats")}
    <div class="name">
      <h1>paceline</h1>
      <p class="model" title=${model?.id}>${model ? model.id : ""}</p>
    </div>
    <div class="actions">
      <button type="button" aria-label="New chat" disabled=${!canStart} onClick=${startChat}>
        <span aria-hidden="true">+</span><span class="words">New chat</span>
      </button>
      <button type="button" aria-label="Theme: ${theme}, change to ${next}" title="Theme: ${theme}" onClick=${() => changeTheme(next)}>
        <span aria-hidden="true">${THEMES[theme] ?? THEMES.system}</span>
      </button>
      ${toggle("settings", "⚙", "Settings")}
    </div>
  </header>`;
}
