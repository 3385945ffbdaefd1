// Hands out the page's own files when the server does not answer. Nothing else passes through it: no request of the API, no answer.
// The server writes the first line: FILES, their addresses relative to this file, and VERSION, a hash of their contents.
/* global FILES, VERSION */

const PREFIX = `paceline ${self.registration.scope} `;
const CACHE = PREFIX + VERSION;
const addresses = new Set(FILES.map((file) => new URL(file, self.location).href));

self.addEventListener("install", (event) => {
  const requests = [...addresses].map((address) => new Request(address, { cache: "reload" }));
  event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(requests)).then(() => self.skipWaiting()));
});

self.addEventListener("activate", (event) => {
  event.waitUntil(deleteOlder().then(() => self.clients.claim()));
});

async function deleteOlder() {
  const names = await caches.keys();
  await Promise.all(names.filter((name) => name.startsWith(PREFIX) && name !== CACHE).map((name) => caches.delete(name)));
}

self.addEventListener("fetch", (event) => {
  if (event.request.method !== "GET" || !addresses.has(event.request.url)) return;
  event.respondWith(fetch(event.request).catch(() => caches.open(CACHE).then((cache) => cache.match(event.request.url))));
});
