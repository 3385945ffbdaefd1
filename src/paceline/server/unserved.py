"""Paths of other programs' APIs that clients call and this server does not serve: each answer names what is served instead."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from paceline.server.errors import HttpError
from paceline.server.model_pool import ModelPool

_EMBEDDINGS = "embeddings are not served, only generated text: use /v1/chat/completions, /v1/completions or /api/chat here, and another "
_EMBEDDINGS += "server for embeddings"
_LOADING = "this server serves {models}, named at its start: use such a name, or start another server (paceline serve MODEL)"
_COMPLETION = "llama.cpp's own completions are not served: use /v1/completions with prompt and max_tokens, as OpenAI's API has them"
UNSERVED = {
    "/completion": _COMPLETION,
    "/infill": _COMPLETION,
    "/slots": "slots are not served: GET /metrics counts the requests that run and wait",
    "/embedding": _EMBEDDINGS,
    "/v1/embeddings": _EMBEDDINGS,
    "/embeddings": _EMBEDDINGS,
    "/api/embed": _EMBEDDINGS,
    "/api/embeddings": _EMBEDDINGS,
    "/api/pull": f"models are not pulled: {_LOADING}",
    "/api/push": f"models are not pushed: {_LOADING}",
    "/api/create": f"models are not created: {_LOADING}",
    "/api/copy": f"models are not copied: {_LOADING}",
    "/api/delete": f"models are not deleted, remove files yourself: {_LOADING}",
}
"""Texts of errors by path."""


def unserved_routes(pool: ModelPool) -> APIRouter:
    """Return the routes; each answers with status 501."""
    router = APIRouter(include_in_schema=False)
    models = ", ".join(repr(model.name) for model in pool.models)
    for path, text in UNSERVED.items():
        router.add_api_route(path, _refusal(text.format(models=models)), methods=["GET", "POST", "DELETE"])
    return router


def _refusal(text: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def refuse() -> Response:
        raise HttpError(501, text, code="not_served")

    return refuse
