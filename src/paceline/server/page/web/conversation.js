// A conversation is a tree: {nodes, leaf}. Editing a message or retrying an answer adds a branch; the branch that ends with the node
// `leaf` is shown. A node is {id, parent, role: "user", text, files} or {id, parent, role: "assistant", answer, comparison}. Values.
import { promptOf } from "./attachments.js";

export const EMPTY = { nodes: [], leaf: null };

// An id that no other tab draws.
export function newId() {
  return [...crypto.getRandomValues(new Uint32Array(3))].map((number) => number.toString(36)).join("");
}

export function withMessage(conversation, { text, files = [] }, parent = conversation.leaf) {
  return withNode(conversation, { parent, role: "user", text, files });
}

// The conversation with an answer, not begun yet, to a message.
export function withAnswer(conversation, answer, parent = conversation.leaf) {
  return withNode(conversation, { parent, role: "assistant", answer, comparison: null });
}

function withNode({ nodes }, fields) {
  const node = { id: newId(), ...fields };
  return { nodes: [...nodes, node], leaf: node.id };
}

export function withChange({ nodes, leaf }, id, change) {
  return { nodes: nodes.map((node) => (node.id === id ? { ...node, ...change } : node)), leaf };
}

export function nodeOf({ nodes }, id) {
  return nodes.find((node) => node.id === id);
}

// The nodes of the branch that ends with `leaf`, the first one first.
export function branchOf({ nodes, leaf }) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const branch = [];
  for (let node = byId.get(leaf); node; node = byId.get(node.parent)) branch.unshift(node);
  return branch;
}

// The ids of a node and of those that were written in its place, oldest first.
export function versionsOf({ nodes }, { parent }) {
  return nodes.filter((node) => node.parent === parent).map(({ id }) => id);
}

// The conversation with the newest branch through a node.
export function withShown({ nodes }, id) {
  const next = nodes.findLast((node) => node.parent === id);
  return next ? withShown({ nodes }, next.id) : { nodes, leaf: id };
}

// As the API takes them; an answer without text is left out.
export function messagesOf(branch, system) {
  const messages = branch.map((node) => ({ role: node.role, content: node.role === "user" ? promptOf(node) : node.answer.text }));
  return [{ role: "system", content: system }, ...messages].filter((message) => message.content !== "");
}

// The first words of a conversation.
export function titleOf({ nodes }) {
  const first = nodes.find((node) => node.role === "user");
  const line = (first?.text || first?.files[0]?.name || "").trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}
