"""The ASGI application of a server's models."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from paceline import __version__
from paceline.engine.async_engine import AsyncEngine
from paceline.errors import PacelineError
from paceline.server.adapter_routes import adapter_routes
from paceline.server.answering import add_answer_route, add_json_route
from paceline.server.anthropic import ConversationFields, MessagesFields, count_tokens, messages
from paceline.server.apis import handle_errors
from paceline.server.errors import HttpError
from paceline.server.middleware import add_middleware
from paceline.server.model_pool import ModelPool
from paceline.server.model_routes import model_routes
from paceline.server.ollama import ollama_routes
from paceline.server.openai_chat import ChatFields, chat_completions
from paceline.server.openai_completions import CompletionFields, completions
from paceline.server.page.routes import page_routes
from paceline.server.responses import ResponsesFields, responses
from paceline.server.settings import ServerSettings

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


def create_app(engine: AsyncEngine, settings: ServerSettings | None = None) -> FastAPI:
    """Return an ASGI application that serves `engine`.

    Its `state.service` is a `ModelPool`, whose `admission` a server drains before it ends.

    Args:
        engine: the caller closes it after the application has ended.
        settings: None = those of `ServerSettings()`.

    Raises:
        ConfigError: a parser of the settings does not exist, or an adapter has the name of the model.
    """
    return create_pool_app(ModelPool.of_engine(engine, settings or ServerSettings()))


def create_pool_app(pool: ModelPool) -> FastAPI:
    """Return an ASGI application that serves the models of `pool`, its `state.service`; the caller closes the pool."""
    # the pages of the docs load code from other hosts, and a redirect would follow the Host header
    app = FastAPI(title="paceline", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = pool
    for routes in (openai_routes, model_routes, anthropic_routes, ollama_routes, adapter_routes, state_routes, unserved_routes):
        app.include_router(routes(pool))
    app.include_router(page_routes())
    handle_errors(app)
    add_middleware(app, pool.settings, pool.admission, pool.count_response)
    return app


def openai_routes(pool: ModelPool) -> APIRouter:
    """The routes that answer in OpenAI's APIs."""
    router = APIRouter(tags=["openai"])
    add_answer_route(router, pool, "/v1/chat/completions", ChatFields, chat_completions)
    add_answer_route(router, pool, "/v1/completions", CompletionFields, completions)
    add_answer_route(router, pool, "/v1/responses", ResponsesFields, responses)
    return router


def anthropic_routes(pool: ModelPool) -> APIRouter:
    router = APIRouter(tags=["anthropic"])
    add_answer_route(router, pool, "/v1/messages", MessagesFields, messages)
    add_json_route(router, pool, "/v1/messages/count_tokens", ConversationFields, count_tokens)
    return router


def state_routes(pool: ModelPool) -> APIRouter:
    """The routes for health checks and metrics."""
    router = APIRouter(tags=["state"])

    @router.get("/health")
    async def health() -> Response:
        """200 while the engines run, else 503: restart the server. The states of the models are shown where no key is needed."""
        return _state(pool, is_refused=False)

    @router.get("/ready")
    async def ready() -> Response:
        """200 while requests are taken; 503 while the server drains: send them elsewhere."""
        return _state(pool, is_refused=pool.admission.is_draining)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Counters and histograms in Prometheus's text form."""
        return Response(await pool.metrics(), media_type=CONTENT_TYPE_LATEST)

    return router


def _state(pool: ModelPool, *, is_refused: bool) -> Response:
    try:
        for model in pool.models:
            if model.service is not None:
                model.service.engine.check_open()
    except PacelineError:
        return JSONResponse({"status": "failed"}, 503)
    if is_refused:
        return JSONResponse({"status": "draining"}, 503)
    models = {} if pool.settings.api_keys else {"models": {model.name: model.state for model in pool.models}}
    return JSONResponse({"status": "ok", **models})


def unserved_routes(pool: ModelPool) -> APIRouter:
    """Return routes of other programs' APIs that are not served; each answers with status 501 and names what is served instead."""
    router = APIRouter(include_in_schema=False)
    models = ", ".join(repr(model.name) for model in pool.models)
    for path, text in UNSERVED.items():
        router.add_api_route(path, _unserved(text.format(models=models)), methods=["GET", "POST", "DELETE"])
    return router


def _unserved(text: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def unserved() -> Response:
        raise HttpError(501, text, code="not_served")

    return unserved
