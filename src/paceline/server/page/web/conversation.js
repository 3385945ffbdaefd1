// The turns of a conversation: {id, role: "user", text} and {id, role: "assistant", answer}. Values, as answers are.

let lastId = 0;

function newId() {
  lastId += 1;
  return lastId;
}

export function withMessage(turns, text) {
  return [...turns, { id: newId(), role: "user", text }];
}

// The turns with an answer, not begun yet, to all of them.
export function withAnswer(turns, answer) {
  return [...turns, { id: newId(), role: "assistant", answer, comparison: null }];
}

// The turns in front of one, and the message that replaces it.
export function withEdited(turns, id, text) {
  return withMessage(before(turns, id), text);
}

export function before(turns, id) {
  return turns.slice(0, turns.findIndex((turn) => turn.id === id));
}

export function withChange(turns, id, change) {
  return turns.map((turn) => (turn.id === id ? { ...turn, ...change } : turn));
}

// As the API takes them; an answer without text is left out.
export function messagesOf(turns) {
  return turns
    .map((turn) => ({ role: turn.role, content: turn.role === "user" ? turn.text : turn.answer.text }))
    .filter((message) => message.content !== "");
}
