// Text files that go into a message: {name, text}.

export const MAX_FILE_BYTES = 1_000_000;

// The text of a file of the person's; an Error says why there is none.
export async function readTextFile(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(`${file.name} has ${sizeOf(file.size)}; a file may have ${sizeOf(MAX_FILE_BYTES)}`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name, text };
  } catch {
    // as below
  }
  throw new Error(`${file.name} is not a text file in UTF-8`);
}

export function sizeOf(bytes) {
  return bytes < 1000 ? `${bytes} bytes` : bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : `${(bytes / 1_000_000).toFixed(1)} MB`;
}

// A message as the model reads it: the files follow the text, each in a fence longer than any in it.
export function promptOf({ text, files = [] }) {
  const parts = files.map((file) => {
    const longest = Math.max(2, ...[...file.text.matchAll(/`+/g)].map(([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${file.name}:\n${fence}\n${file.text.replace(/\n$/, "")}\n${fence}`;
  });
  return [text, ...parts].filter(Boolean).join("\n\n");
}
