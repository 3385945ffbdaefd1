"""The page at `/`: a chat in the browser that shows drafted tokens. Its files are those of the folders `web` and `vendor`."""

import hashlib
import json
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

PAGE, SERVICE_WORKER = "/", "/page/service_worker.js"
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml",
    "webmanifest": "application/manifest+json", "js": "text/javascript; charset=utf-8", "mjs": "text/javascript; charset=utf-8",
}  # fmt: skip
_FILES = {
    PAGE if file.name == "index.html" else f"/page/{place}{file.name}": file
    for folder, place in (("web", ""), ("vendor", "vendor/"))
    for file in sorted(files("paceline.server.page").joinpath(folder).iterdir(), key=lambda file: file.name)
    if file.name.rpartition(".")[2] in MEDIA_TYPES
}
PAGE_PATHS = tuple(_FILES)
"""Served without a key, which a browser cannot send for these. Nothing here is secret."""
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
    contents = {path: file.read_bytes() for path, file in _FILES.items()}
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
    kind = _FILES[path].name.rpartition(".")[2]
    headers = {**_HEADERS, "Content-Type": MEDIA_TYPES[kind], "Content-Length": str(len(content))}
    if path == SERVICE_WORKER:
        headers["Service-Worker-Allowed"] = "../"  # the page is one folder above this file

    async def file() -> Response:
        return Response(content, headers=headers)

    router.add_api_route(path, file, methods=["GET"])
