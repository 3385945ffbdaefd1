// What the server is asked, and what can go wrong. Addresses are relative: a proxy may put the page under a path.

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export class ConnectionLost extends Error {}

// The model that is served: its id, the drafters that a request may name, and the ids of its adapters and of other models, which are
// asked for as models. Drafters are null where they are not known: of a model that is not loaded, and of one of several.
export async function servedModel(key) {
  const answer = await ask("v1/models", key, {});
  const [model, ...others] = (await answer.json()).data;
  const isKnown = model.status.value === "loaded" && others.every(({ parent }) => parent);
  return { ...model, drafters: isKnown ? model.drafters : null, adapters: others.map(({ id }) => id) };
}

// The events of one answer, as they come. Leaving the loop, or aborting `signal`, ends the request.
export async function* chatEvents(fields, key, signal) {
  const body = JSON.stringify(fields);
  const answer = await ask("v1/chat/completions", key, { method: "POST", body, signal });
  let isWhole = false;
  for await (const data of dataOf(answer.body)) {
    isWhole = data === "[DONE]";
    if (isWhole) break;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, answer.status);
    yield event;
  }
  if (!isWhole) throw new ConnectionLost("the stream ended before the answer did");
}

async function ask(path, key, options) {
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await reached(() => fetch(path, { ...options, headers, credentials: "omit", redirect: "error" }));
  if (!answer.ok) throw new ApiError(await messageOf(answer), answer.status);
  return answer;
}

async function messageOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered with status ${answer.status}`;
  }
}

// The data of server-sent events; each of ours is one line and ends with an empty one.
async function* dataOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reached(() => reader.read());
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) yield event.slice("data: ".length);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function reached(work) {
  try {
    return await work();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ConnectionLost("the server cannot be reached");
  }
}
