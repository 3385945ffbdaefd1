// How answers are made: the system prompt, the model or an adapter of it, the drafter, the sampling and the form of the answer; what this
// browser keeps; and the API key where the server asks for one.
import { sizeOf } from "./attachments.js";
import { html } from "./html.js";
import { Panel } from "./panel.js";
import { AS_LOADED, DEFAULTS, JSON_FIELDS, LISTS, NO_DRAFTER, NUMBERS, PENALTIES, jsonFault } from "./request.js";

const DRAFT_TOKENS = { name: "numSpeculativeTokens", label: "Draft tokens a step", hint: "as loaded", min: 0, max: 64, step: 1 };
const SWITCHES = { keepsChats: "Keep chats", opensTokens: "Open the tokens of new answers" };

export function SettingsPanel({ models, model, settings, change, preferences, changePreferences, close, ...access }) {
  const set = (name) => (event) => change({ [name]: event.currentTarget.value });
  const drafters = draftersOf(model);
  const drafter = drafters.some(([name]) => name === settings.drafter) ? settings.drafter : AS_LOADED;
  const number = (field) => html`<${NumberField} key=${field.name} field=${field} value=${settings[field.name]} set=${set(field.name)} />`;
  const text = (field, fault = "") =>
    html`<${TextField} key=${field.name} field=${field} value=${settings[field.name]} set=${set(field.name)} fault=${fault} />`;
  return html`<${Panel} id="settings" title="Settings" close=${close}>
    ${access.asksForKey && html`<${KeyField} ...${access} />`}
    ${text({ name: "system", label: "System prompt", hint: "none" })}
    ${model &&
    html`<${Choice} id="model" label="Model" value=${model.id} set=${set("model")} options=${models.map(factsOf)} />`}
    <${Choice} id="drafter" label="Drafter" value=${drafter} set=${set("drafter")} options=${drafters} />
    ${number(DRAFT_TOKENS)}
    <fieldset class="grid"><legend>Sampling</legend>${NUMBERS.map(number)}</fieldset>
    <p class="note">An empty field is left to the server and its model.</p>
    <details><summary>Penalties, stop texts, biases</summary>
      <div class="grid">${PENALTIES.map(number)}</div>
      ${LISTS.map((field) => text(field))} ${text(JSON_FIELDS[0], jsonFault(settings.logit_bias))}
    </details>
    <details><summary>JSON schema</summary>${text(JSON_FIELDS[1], jsonFault(settings.schema))}</details>
    <fieldset><legend>This browser</legend>
      ${Object.entries(SWITCHES).map(([name, label]) => {
        const toggle = (event) => changePreferences({ [name]: event.currentTarget.checked });
        return html`<label class="check" key=${name}>
          <input type="checkbox" checked=${preferences[name]} onChange=${toggle} />
          ${label}
        </label>`;
      })}
    </fieldset>
    <button type="button" onClick=${() => change(DEFAULTS)}>Reset the settings</button>
  <//>`;
}

function NumberField({ field: { name, label, hint = "default", ...limits }, value, set }) {
  return html`<div class="field">
    <label for=${name}>${label}</label>
    <input id=${name} type="number" inputmode="decimal" placeholder=${hint} value=${value} onInput=${set} ...${limits} />
  </div>`;
}

function TextField({ field: { name, label, hint }, value, set, fault }) {
  const about = fault ? `${name}-fault` : undefined;
  return html`<div class="field">
    <label for=${name}>${label}</label>
    <textarea
      id=${name}
      rows="2"
      spellcheck=${name === "system"}
      placeholder=${hint}
      value=${value}
      onInput=${set}
      aria-invalid=${fault ? "true" : undefined}
      aria-describedby=${about}
    />
    ${fault && html`<p id=${about} class="note">Not JSON: ${fault}</p>`}
  </div>`;
}

function Choice({ id, label, value, set, options }) {
  return html`<div class="field">
    <label for=${id}>${label}</label>
    <select id=${id} value=${value} onChange=${set}>
      ${options.map(([name, shown]) => html`<option key=${name} value=${name}>${shown}</option>`)}
    </select>
  </div>`;
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

// An option for a model: its name, and where the server says so its number of parameters, quantisation and size.
function factsOf({ id, meta: { n_params, quantization, size } = {} }) {
  const facts = [n_params && `${Math.round(n_params / 1e6)} M parameters`, quantization, size && sizeOf(size)];
  return [id, [id, ...facts].filter(Boolean).join(" · ")];
}

// The drafters that a request may select: all that are loaded together, one of them, none.
function draftersOf(model) {
  const loaded = model?.drafters ?? [];
  const isLoaded = model && model.status?.value !== "unloaded";
  const together = isLoaded ? loaded.join("+") || "none is loaded" : "as loaded";
  return [[AS_LOADED, together], ...(loaded.length > 1 ? loaded.map((name) => [name, name]) : []), [NO_DRAFTER, "none (plain)"]];
}
