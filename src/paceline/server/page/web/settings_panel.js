// How answers are made: the model or an adapter of it, the drafter, the sampling, and the API key where the server asks for one.
import { html } from "./html.js";
import { AS_LOADED, NO_DRAFTER } from "./request.js";

const NUMBERS = [
  { name: "numSpeculativeTokens", label: "Draft tokens a step", hint: "as loaded", min: 0, max: 64, step: 1 },
  { name: "temperature", label: "Temperature", hint: "1", min: 0, max: 5, step: 0.1 },
  { name: "topP", label: "Top p", hint: "1", min: 0.01, max: 1, step: 0.01 },
  { name: "maxTokens", label: "Max tokens", hint: "the rest", min: 1, step: 1 },
  { name: "seed", label: "Seed", hint: "drawn", min: 0, step: 1 },
];

export function SettingsPanel({ model, settings, change, asksForKey, apiKey, changeKey, checkKey }) {
  const set = (name) => (event) => change({ [name]: event.currentTarget.value });
  return html`<section id="settings" class="settings" aria-label="Settings">
    ${asksForKey && html`<${KeyField} apiKey=${apiKey} changeKey=${changeKey} checkKey=${checkKey} />`}
    ${model?.adapters.length > 0 &&
    html`<div class="field">
      <label for="model">Model</label>
      <select id="model" value=${settings.adapter} onChange=${set("adapter")}>
        <option value="">${model.id}</option>
        ${model.adapters.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select>
    </div>`}
    <div class="field">
      <label for="drafter">Drafter</label>
      <select id="drafter" value=${settings.drafter} onChange=${set("drafter")}>
        <option value=${AS_LOADED}>${asLoaded(model)}</option>
        ${single(model).map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        <option value=${NO_DRAFTER}>none (plain)</option>
      </select>
    </div>
    ${NUMBERS.map(
      ({ name, label, hint, ...limits }) =>
        html`<div class="field" key=${name}>
          <label for=${name}>${label}</label>
          <input id=${name} type="number" inputmode="decimal" placeholder=${hint} value=${settings[name]} onInput=${set(name)} ...${limits} />
        </div>`,
    )}
  </section>`;
}

function KeyField({ apiKey, changeKey, checkKey }) {
  return html`<div class="field key">
    <label for="key">API key</label>
    <input
      id="key"
      type="password"
      autocomplete="off"
      spellcheck="false"
      aria-describedby="key-note"
      value=${apiKey}
      onInput=${(event) => changeKey(event.currentTarget.value)}
      onKeyDown=${(event) => event.key === "Enter" && checkKey()}
    />
    <button type="button" onClick=${checkKey}>Use key</button>
    <p id="key-note" class="note">Kept in this tab until it is closed.</p>
  </div>`;
}

// The drafters of a request that selects none: all that are loaded.
function asLoaded(model) {
  if (!model?.drafters) return "as loaded";
  return model.drafters.join("+") || "none is loaded";
}

function single(model) {
  return model?.drafters?.length > 1 ? model.drafters : [];
}
