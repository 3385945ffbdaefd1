// Keep the page's files for when the server is not running: chats can be read then. The service worker asks the network first, so what
// is shown is what the server has. A browser without one, or an address that is neither HTTPS nor this machine, does without.

// The page's policy takes addresses of scripts from here only.
const policy = window.trustedTypes?.createPolicy("paceline-worker", { createScriptURL: () => "page/service_worker.js" });

export async function keepForOffline() {
  const address = policy?.createScriptURL("") ?? "page/service_worker.js";
  await navigator.serviceWorker?.register(address, { scope: "./" }).catch(() => {}); // a browser may forbid it
}
