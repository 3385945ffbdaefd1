"""The page at `/`: a chat in the browser that shows drafted tokens. Its files are a fixed list in the package."""

import hashlib
import json
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

PAGE = "/"
OWN_FILES = (
    "style.css", "icon.svg", "manifest.webmanifest", "answer.js", "answer_view.js", "api.js", "app.js", "attachments.js", "chat_list.js",
    "chat_view.js", "chats.js", "comparison_view.js", "composer.js", "conversation.js", "generation.js", "header.js", "html.js",
    "kept.js", "markdown.js", "message_view.js", "offline.js", "panel.js", "request.js", "settings_panel.js", "strip.js", "tokens.js",
    "tree.js", "versions.js", "welcome.js",
)  # fmt: skip
LIBRARIES = ("preact.mjs", "htm.mjs", "markdown-it.esm.min.mjs", "purify.es.mjs", "highlight.min.js")
SERVICE_WORKER = "/page/service_worker.js"
_PLACES = {
    PAGE: ("web", "index.html"),
    **{f"/page/{name}": ("web", name) for name in OWN_FILES},
    **{f"/page/vendor/{name}": ("vendor", name) for name in LIBRARIES},
    SERVICE_WORKER: ("web", "service_worker.js"),
}
PAGE_PATHS = tuple(_PLACES)
"""Served without a key, which a browser cannot send for these. Nothing here is secret."""

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml",
    "webmanifest": "application/manifest+json", "js": "text/javascript; charset=utf-8", "mjs": "text/javascript; charset=utf-8",
}  # fmt: skip
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "worker-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify paceline-worker"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


def page_routes() -> APIRouter:
    """Return a router with the page and its files, whose contents are read now."""
    router = APIRouter(include_in_schema=False)
    contents = {path: files("paceline.server.page").joinpath(*place).read_bytes() for path, place in _PLACES.items()}
    contents[SERVICE_WORKER] = _listed(contents) + contents[SERVICE_WORKER]
    for path, content in contents.items():
        _add(router, path, content)
    return router


def _listed(contents: dict[str, bytes]) -> bytes:
    """The service worker's first line: the files it keeps, relative to it, and a hash, with which a browser sees that one changed."""
    paths = [".." + path if path == PAGE else path.removeprefix("/page/") for path in contents if path != SERVICE_WORKER]
    version = hashlib.sha256(b"".join(contents.values())).hexdigest()[:16]
    return f"const FILES = {json.dumps(paths)}, VERSION = {json.dumps(version)};\n".encode()


def _add(router: APIRouter, path: str, content: bytes) -> None:
    kind = _PLACES[path][1].rpartition(".")[2]
    headers = {**_HEADERS, "Content-Type": MEDIA_TYPES[kind], "Content-Length": str(len(content))}
    if path == SERVICE_WORKER:
        headers["Service-Worker-Allowed"] = "../"  # the page is one folder above this file

    async def file() -> Response:
        return Response(content, headers=headers)

    router.add_api_route(path, file, methods=["GET"])
