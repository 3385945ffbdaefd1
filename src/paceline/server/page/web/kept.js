// What outlives a reload besides the chats: the key and the chat that is open as long as the tab, preferences as long as the browser.

export const KEY = "paceline-key";
export const CHAT = "paceline-chat";
const PREFERENCES = "paceline-preferences";
const DEFAULT_PREFERENCES = { theme: "system", keepsChats: true, opensTokens: false, settings: {} };

export function kept(name, storage = () => sessionStorage) {
  try {
    return storage().getItem(name) ?? "";
  } catch {
    return ""; // a browser may forbid it
  }
}

export function keep(name, value, storage = () => sessionStorage) {
  try {
    storage().setItem(name, value);
  } catch {
    // then it lasts until the next reload
  }
}

export function keptPreferences() {
  try {
    return { ...DEFAULT_PREFERENCES, ...JSON.parse(kept(PREFERENCES, () => localStorage) || "{}") };
  } catch {
    return DEFAULT_PREFERENCES; // written by something else
  }
}

export function keepPreferences(preferences) {
  keep(PREFERENCES, JSON.stringify(preferences), () => localStorage);
}
