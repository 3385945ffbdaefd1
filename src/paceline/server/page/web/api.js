// What the server is asked, and what can go wrong. Addresses are relative: a proxy may put the page under a path.

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export class ConnectionLost extends Error {}

// What a request may name as its model: {id, drafters, hasTemplate}, the models and their adapters.
export async function servedModels(key) {
  const answer = await ask("v1/models", key, {});
  const templates = {};
  return Promise.all(
    (await answer.json()).data.map(async (model) => {
      const owner = model.parent ?? model.id;
      templates[owner] ??= ask(`props?model=${encodeURIComponent(owner)}`, key, {}).then((props) => props.json());
      return { ...model, hasTemplate: (await templates[owner]).chat_template !== "" };
    }),
  );
}

// The events of one answer, as they come. Leaving the loop, or aborting `signal`, ends the request.
export async function* answerEvents({ fields, isChat }, messages, key, signal) {
  const prompt = messages.map(({ content }) => content).join("\n\n");
  const body = JSON.stringify({ ...fields, ...(isChat ? { messages } : { prompt }) });
  const answer = await ask(isChat ? "v1/chat/completions" : "v1/completions", key, { method: "POST", body, signal });
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
