// From what is chosen on the page to the fields of a request. An empty field is left to the server.

export const AS_LOADED = "";
export const NO_DRAFTER = "none";

// Numbers, by the names of the API.
export const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 5, step: 0.05 },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01 },
  { name: "top_k", label: "Top k", min: 0, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "max_tokens", label: "Max tokens", hint: "the rest", min: 1, step: 1 },
  { name: "seed", label: "Seed", hint: "drawn", min: 0, step: 1 },
];
export const PENALTIES = [
  { name: "repetition_penalty", label: "Repetition", min: 0.01, max: 5, step: 0.05 },
  { name: "presence_penalty", label: "Presence", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency", min: -2, max: 2, step: 0.1 },
  { name: "min_tokens", label: "Min tokens", min: 0, step: 1 },
];
// Texts, one a line, and JSON.
export const LISTS = [
  { name: "stop", label: "Stop texts, one a line" },
  { name: "bad_words", label: "Banned words, one a line" },
];
export const JSON_FIELDS = [
  { name: "logit_bias", label: "Logit bias", hint: '{"token id": -100}' },
  { name: "schema", label: "JSON schema of the answer", hint: '{"type": "object", "properties": {…}}' },
];

const TEXTS = [...NUMBERS, ...PENALTIES, ...LISTS, ...JSON_FIELDS].map(({ name }) => [name, ""]);
export const DEFAULTS = {
  ...Object.fromEntries(TEXTS),
  model: "",
  system: "",
  drafter: AS_LOADED,
  numSpeculativeTokens: "",
  max_tokens: "1024",
};

// Without a seed one is drawn here, so that an answer can be repeated; it fits a number of JavaScript, as the server's own would not.
// An Error says which of the settings is no JSON.
export function chatFields(model, settings) {
  const numbers = [...NUMBERS, ...PENALTIES].map(({ name }) => [name, numberOf(settings[name])]);
  const lists = LISTS.map(({ name }) => [name, linesOf(settings[name])]);
  const schema = jsonOf("schema", settings);
  return {
    model: model?.id,
    stream: true,
    stream_options: { include_usage: true },
    ...Object.fromEntries([...numbers, ...lists]),
    seed: numberOf(settings.seed) ?? crypto.getRandomValues(new Uint32Array(1))[0],
    logit_bias: jsonOf("logit_bias", settings),
    response_format: schema && { type: "json_schema", json_schema: { name: "answer", schema } },
    speculation: speculationOf(model, settings),
  };
}

// The same request for plain decoding; `maxTokens` cuts it where the other answer was cut.
export function withoutDrafts(fields, maxTokens) {
  return { ...fields, max_tokens: maxTokens ?? fields.max_tokens, speculation: { enabled: false, trees: true } };
}

export function isPlain(fields) {
  return fields.speculation.enabled === false;
}

// Why a setting that is JSON is none, "" = it is.
export function jsonFault(text) {
  try {
    if (text.trim()) JSON.parse(text);
    return "";
  } catch (error) {
    return error.message;
  }
}

function jsonOf(name, settings) {
  const { label } = JSON_FIELDS.find((field) => field.name === name);
  const fault = jsonFault(settings[name]);
  if (fault) throw new Error(`${label} is not JSON: ${fault}`);
  return settings[name].trim() ? JSON.parse(settings[name]) : undefined;
}

function speculationOf(model, { drafter, numSpeculativeTokens }) {
  if (drafter === NO_DRAFTER) return { enabled: false, trees: true };
  const chosen = model?.drafters.includes(drafter) ? drafter : undefined; // kept settings may name one of another model
  return { trees: true, drafter: chosen, num_speculative_tokens: numberOf(numSpeculativeTokens) };
}

function numberOf(text) {
  return text.trim() === "" ? undefined : Number(text);
}

function linesOf(text) {
  const lines = text.split("\n").filter((line) => line !== "");
  return lines.length ? lines : undefined;
}
