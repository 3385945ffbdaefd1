// Chats that are kept in this browser, in IndexedDB: what the list shows of them, and their contents.
// A chat is {id, createdAt, settings, nodes, leaf}. Promises fail where a browser forbids or lacks the room.
import { STOPPED, isRunning } from "./answer.js";
import { branchOf, messagesOf, titleOf } from "./conversation.js";

let database = null;

function opened() {
  database ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("paceline", 1);
    request.onupgradeneeded = () => {
      for (const name of ["list", "contents"]) request.result.createObjectStore(name, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return database;
}

// Do `work` with both stores, all or nothing; the result is that of the request that it returns.
async function transact(mode, work) {
  const transaction = (await opened()).transaction(["list", "contents"], mode);
  return new Promise((resolve, reject) => {
    const request = work(transaction.objectStore("list"), transaction.objectStore("contents"));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error ?? new Error("the browser refused to keep it"));
  });
}

// {id, title, updatedAt, text} of each chat, the newest first; `text` is what a search reads.
export async function listChats() {
  const list = await transact("readonly", (list) => list.getAll());
  return list.sort((left, right) => right.updatedAt - left.updatedAt);
}

// One chat; an answer that was being made when its page was closed has been stopped.
export async function loadChat(id) {
  const chat = await transact("readonly", (_, contents) => contents.get(id));
  return chat && { ...chat, nodes: chat.nodes.map((node) => (node.answer ? { ...node, ...ended(node) } : node)) };
}

function ended({ answer, comparison }) {
  const stopped = (one) => (one && isRunning(one) ? { ...one, status: STOPPED } : one);
  return { answer: stopped(answer), comparison: stopped(comparison) };
}

// Keep a chat; branches that another tab has added to it stay.
export function saveChat(chat) {
  return transact("readwrite", (list, contents) => {
    const request = contents.get(chat.id);
    request.onsuccess = () => {
      const ids = new Set(chat.nodes.map(({ id }) => id));
      const others = request.result?.nodes.filter(({ id }) => !ids.has(id)) ?? [];
      const nodes = [...others, ...chat.nodes];
      const text = messagesOf(nodes, chat.settings.system).map(({ content }) => content).join("\n");
      contents.put({ ...chat, nodes });
      list.put({ id: chat.id, title: titleOf(chat), updatedAt: Date.now(), text });
    };
  });
}

// Delete one chat, or without an id all of them.
export function deleteChats(id = null) {
  return transact("readwrite", (...stores) => {
    for (const store of stores) id === null ? store.clear() : store.delete(id);
  });
}

// A chat as Markdown: the branch that is shown.
export function markdownOf(chat) {
  const heading = (node) => (node.role === "user" ? "## You" : `## ${node.answer.fields.model}`);
  const parts = branchOf(chat).flatMap((node) => messagesOf([node], "").map(({ content }) => `${heading(node)}\n\n${content}`));
  const system = chat.settings.system && `## System prompt\n\n${chat.settings.system}`;
  const date = new Date(chat.createdAt).toISOString().slice(0, 10);
  return `${[`# ${titleOf(chat)}`, date, system, ...parts].filter(Boolean).join("\n\n")}\n`;
}

// A chat as JSON: the messages of the branch that is shown, and everything that is kept.
export function jsonOf(chat) {
  const messages = messagesOf(branchOf(chat), chat.settings.system);
  return `${JSON.stringify({ title: titleOf(chat), messages, chat }, null, 1)}\n`;
}
