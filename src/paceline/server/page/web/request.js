// From what is chosen on the page to the fields of a request.

export const AS_LOADED = "";
export const NO_DRAFTER = "none";

export const DEFAULTS = {
  adapter: "",
  drafter: AS_LOADED,
  numSpeculativeTokens: "",
  temperature: "0.7",
  topP: "1",
  maxTokens: "512",
  seed: "",
};

// Without a seed one is drawn here, so that an answer can be repeated; it fits a number of JavaScript, as the server's own would not.
export function chatFields(model, messages, settings) {
  return {
    model: settings.adapter || model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: numberOf(settings.temperature),
    top_p: numberOf(settings.topP),
    max_tokens: numberOf(settings.maxTokens),
    seed: numberOf(settings.seed) ?? crypto.getRandomValues(new Uint32Array(1))[0],
    speculation: speculationOf(settings),
  };
}

// The same request for plain decoding; `maxTokens` cuts it where the other answer was cut.
export function withoutDrafts(fields, maxTokens) {
  return { ...fields, max_tokens: maxTokens ?? fields.max_tokens, speculation: { enabled: false, trees: true } };
}

export function isPlain(fields) {
  return fields.speculation.enabled === false;
}

function speculationOf({ drafter, numSpeculativeTokens }) {
  if (drafter === NO_DRAFTER) return { enabled: false, trees: true };
  return { trees: true, drafter: drafter || undefined, num_speculative_tokens: numberOf(numSpeculativeTokens) };
}

function numberOf(text) {
  return text.trim() === "" ? undefined : Number(text);
}
