// What outlives a reload besides the chats: the key and the chat that is open as long as the tab, preferences as long as the browser keeps
// them.

const PREFERENCES = "paceline-preferences";
export const DEFAULT_PREFERENCES = { theme: "system", keepsChats: true, opensTokens: false, settings: {} };

export function keptKey() {
  return read(() => sessionStorage, "paceline-key");
}

export function keepKey(key) {
  write(() => sessionStorage, "paceline-key", key);
}

export function keptChat() {
  return read(() => sessionStorage, "paceline-chat");
}

export function keepChat(id) {
  write(() => sessionStorage, "paceline-chat", id);
}

export function keptPreferences() {
  try {
    return { ...DEFAULT_PREFERENCES, ...JSON.parse(read(() => localStorage, PREFERENCES) || "{}") };
  } catch {
    return DEFAULT_PREFERENCES; // written by something else
  }
}

export function keepPreferences(preferences) {
  write(() => localStorage, PREFERENCES, JSON.stringify(preferences));
}

function read(storage, name) {
  try {
    return storage().getItem(name) ?? "";
  } catch {
    return ""; // a browser may forbid it
  }
}

function write(storage, name, value) {
  try {
    storage().setItem(name, value);
  } catch {
    // then it lasts until the next reload
  }
}
