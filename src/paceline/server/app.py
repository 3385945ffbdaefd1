"""The ASGI application of an engine."""

import os
from pathlib import Path

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from paceline import __version__
from paceline.engine.async_engine import AsyncEngine
from paceline.errors import ConfigError, PacelineError
from paceline.parsing.registry import OutputFormat
from paceline.sampling.grammars.compile_sandbox import CompileSandbox
from paceline.server.adapter_routes import adapter_routes
from paceline.server.admission import AdmissionControl
from paceline.server.anthropic import message_routes
from paceline.server.chat import ChatService
from paceline.server.dialects import handle_errors
from paceline.server.generation import Generation
from paceline.server.metrics import Metrics
from paceline.server.middleware import add_middleware
from paceline.server.model_routes import model_routes
from paceline.server.ollama import ollama_routes
from paceline.server.openai_chat import chat_routes
from paceline.server.openai_completions import completion_routes
from paceline.server.page.routes import page_routes
from paceline.server.responses import response_routes
from paceline.server.service import Service
from paceline.server.settings import ServerSettings
from paceline.server.token_texts import TokenTexts
from paceline.server.unserved import unserved_routes


def create_app(engine: AsyncEngine, settings: ServerSettings | None = None) -> FastAPI:
    """Return an ASGI application that serves `engine`.

    Its `state.service` is a `Service`, whose `admission` a server drains before it ends.

    Args:
        engine: the caller closes it after the application has ended.
        settings: None = those of `ServerSettings()`.

    Raises:
        ConfigError: a parser of the settings does not exist, or an adapter has the name of the model.
    """
    settings = settings or ServerSettings()
    engine.loaded.input_processor.compiler.sandbox = CompileSandbox(settings.grammar_timeout_s)
    name = settings.served_model_name or served_model_name(engine.loaded.config.model)
    formats = OutputFormat.of(engine.loaded.input_processor.tokenizer, settings.tool_call_parser, settings.reasoning_parser)
    admission = AdmissionControl(engine.loaded.engine.scheduler.limits.max_num_seqs, settings.max_queue)
    metrics = Metrics(engine.loaded, name)
    generation = Generation(engine, settings, admission, metrics)
    chat, texts = ChatService(generation, formats), TokenTexts(engine.loaded.input_processor.tokenizer)
    service = Service(engine, settings, name, admission, metrics, generation, chat, texts)
    for adapter in filter(service.is_own_name, engine.adapters):
        raise ConfigError(f"an adapter is called {adapter!r}, as the model is: give it another name, or the model with served_model_name")
    # the pages of the docs load code from other hosts, and a redirect would follow the Host header
    app = FastAPI(title="paceline", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
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
        app.include_router(routes(service))
    app.include_router(page_routes())
    handle_errors(app)
    add_middleware(app, settings, admission, metrics.count_response)
    return app


def served_model_name(model: str) -> str:
    """Return the name of a model in requests; of a path only its last part, as clients need not see folders."""
    return Path(os.path.abspath(model)).name if Path(model).exists() else model


def state_routes(service: Service) -> APIRouter:
    """The routes for health checks and metrics."""
    router = APIRouter(tags=["state"])

    @router.get("/health")
    async def health() -> Response:
        """200 while the engine runs, else 503: restart the server."""
        return _state(service, is_refused=False)

    @router.get("/ready")
    async def ready() -> Response:
        """200 while requests are taken; 503 while the server drains: send them elsewhere."""
        return _state(service, is_refused=service.admission.is_draining)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Counters and histograms in Prometheus's text form."""
        return Response(service.metrics.text(await service.engine.stats()), media_type=CONTENT_TYPE_LATEST)

    return router


def _state(service: Service, *, is_refused: bool) -> Response:
    try:
        service.engine.check_open()
    except PacelineError:
        return JSONResponse({"status": "failed"}, 503)
    return JSONResponse({"status": "draining"}, 503) if is_refused else JSONResponse({"status": "ok"})
