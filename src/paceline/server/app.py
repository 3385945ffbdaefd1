"""The ASGI application of a server's models."""

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from paceline import __version__
from paceline.engine.async_engine import AsyncEngine
from paceline.errors import PacelineError
from paceline.server.adapter_routes import adapter_routes
from paceline.server.anthropic import message_routes
from paceline.server.dialects import handle_errors
from paceline.server.middleware import add_middleware
from paceline.server.model_pool import ModelPool
from paceline.server.model_routes import model_routes
from paceline.server.ollama import ollama_routes
from paceline.server.openai_chat import chat_routes
from paceline.server.openai_completions import completion_routes
from paceline.server.page.routes import page_routes
from paceline.server.responses import response_routes
from paceline.server.settings import ServerSettings
from paceline.server.unserved import unserved_routes


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
    for routes in (
        chat_routes,
        completion_routes,
        model_routes,
        response_routes,
        message_routes,
        ollama_routes,
        adapter_routes,
        state_routes,
        unserved_routes,
    ):
        app.include_router(routes(pool))
    app.include_router(page_routes())
    handle_errors(app)
    add_middleware(app, pool.settings, pool.admission, pool.count_response)
    return app


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
