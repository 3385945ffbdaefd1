// One answer of the server, from the request to its end.
import { ApiError, answerEvents } from "./api.js";
import { DONE, FAILED, LOST, STOPPED, withEvent } from "./answer.js";

const SHOW_EVERY_MS = 80; // often enough to look live; the model may want this processor too

// Request an answer and hand it to `show` while it grows, now and then; the whole of it is returned.
export async function generate(answer, messages, key, signal, show) {
  let timer = null;
  const showSoon = () => {
    timer ??= setTimeout(() => {
      timer = null;
      show(answer);
    }, SHOW_EVERY_MS);
  };
  show(answer);
  try {
    for await (const event of answerEvents(answer, messages, key, signal)) {
      answer = withEvent(answer, event, performance.now());
      showSoon();
    }
    answer = { ...answer, status: DONE };
  } catch (error) {
    answer = { ...answer, ...ending(error) };
  }
  clearTimeout(timer);
  show(answer);
  return answer;
}

function ending(error) {
  if (error.name === "AbortError") return { status: STOPPED };
  return { status: error instanceof ApiError ? FAILED : LOST, error: error.message };
}
