// What outlives a reload: the key as long as the tab, the theme as long as the browser wants. Nothing else is kept anywhere.

export function keptKey() {
  return read(() => sessionStorage, "paceline-key");
}

export function keepKey(key) {
  write(() => sessionStorage, "paceline-key", key);
}

export function keptTheme() {
  return read(() => localStorage, "paceline-theme");
}

export function keepTheme(theme) {
  write(() => localStorage, "paceline-theme", theme);
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
