"""The page at `/`: a chat in the browser that shows drafted tokens. Its files are a fixed list in the package."""

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

PAGE = "/"
OWN_FILES = (
    "style.css",
    "icon.svg",
    "answer.js",
    "answer_view.js",
    "api.js",
    "app.js",
    "comparison_view.js",
    "composer.js",
    "conversation.js",
    "header.js",
    "html.js",
    "kept.js",
    "markdown.js",
    "message_view.js",
    "request.js",
    "settings_panel.js",
    "strip.js",
    "tokens.js",
    "tree.js",
    "welcome.js",
)
LIBRARIES = ("preact.mjs", "htm.mjs", "markdown-it.esm.min.mjs", "purify.es.mjs")
PAGE_PATHS = (PAGE, *(f"/page/{name}" for name in OWN_FILES), *(f"/page/vendor/{name}" for name in LIBRARIES))
"""Served without a key, which a browser cannot send for these. Nothing here is secret."""

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
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
    _add(router, PAGE, "web", "index.html")
    for name in OWN_FILES:
        _add(router, f"/page/{name}", "web", name)
    for name in LIBRARIES:
        _add(router, f"/page/vendor/{name}", "vendor", name)
    return router


def _add(router: APIRouter, path: str, folder: str, name: str) -> None:
    content = files("paceline.server.page").joinpath(folder, name).read_bytes()
    headers = {**_HEADERS, "Content-Type": MEDIA_TYPES[name.rpartition(".")[2]], "Content-Length": str(len(content))}

    async def file() -> Response:
        return Response(content, headers=headers)

    router.add_api_route(path, file, methods=["GET"])
