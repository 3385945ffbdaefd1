"""The application: an engine served over HTTP."""

import os
from pathlib import Path

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline import __version__
from paceline.engine.async_engine import AsyncEngine
from paceline.errors import ConfigError
from paceline.parsing.registry import OutputFormat
from paceline.sampling.grammar_trial import GrammarTrial
from paceline.server.adapter_routes import adapter_routes
from paceline.server.anthropic import message_routes
from paceline.server.chat import ChatService
from paceline.server.dialects import handle_errors
from paceline.server.door import Door
from paceline.server.gate import Gate
from paceline.server.generation import Generation
from paceline.server.metrics import Metrics
from paceline.server.model_routes import model_routes
from paceline.server.ollama import ollama_routes
from paceline.server.openai_chat import chat_routes
from paceline.server.openai_completions import completion_routes
from paceline.server.page.routes import page_routes
from paceline.server.responses import response_routes
from paceline.server.service import Service
from paceline.server.settings import ServerSettings
from paceline.server.state import state_routes
from paceline.server.token_texts import TokenTexts

_ROUTES = (chat_routes, completion_routes, model_routes, response_routes, message_routes, ollama_routes, adapter_routes, state_routes)


def create_app(engine: AsyncEngine, settings: ServerSettings | None = None) -> FastAPI:
    """An ASGI application that answers with `engine`.

    Its `state.service` is its `Service`, whose gate a server drains before it ends.

    Args:
        engine: stays the caller's, who closes it after the application has ended.
        settings: None = those of `ServerSettings()`.

    Raises:
        ConfigError: there is no format as the settings name, or an adapter has the model's name.
    """
    settings = settings or ServerSettings()
    engine.opened.maker.compiler.trial = GrammarTrial(settings.grammar_timeout_s)
    name = settings.served_name or served_name(engine.opened.config.model)
    formats = OutputFormat.of(engine.opened.maker.tokenizer, settings.tools_format, settings.think_format)
    gate = Gate(engine.opened.engine.scheduler.limits.max_num_seqs, settings.max_queue)
    metrics = Metrics(engine.opened, name)
    generation = Generation(engine, settings, gate, metrics)
    service = Service(
        engine, settings, name, gate, metrics, generation, ChatService(generation, formats), TokenTexts(engine.opened.maker.tokenizer)
    )
    for adapter in filter(service.is_own_name, engine.adapters):
        raise ConfigError(f"an adapter is called {adapter!r}, as the model is: give it another name, or the model with served_name")
    # those pages load code from elsewhere, and a redirection would go to whatever the Host header names
    app = FastAPI(title="paceline", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    for routes in _ROUTES:
        app.include_router(routes(service))
    app.include_router(page_routes())
    handle_errors(app)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Door, settings=settings, count_answer=metrics.count_answer)
    return app


class HeadAsGet:
    """Middleware: answers HEAD as GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        scope["method"] = "GET"
        try:
            await self._app(scope, receive, send_head)
        finally:
            scope["method"] = "HEAD"  # as it is logged


def served_name(model: str) -> str:
    """The name of a model in requests. A path loses its folders, which clients need not know."""
    return Path(os.path.abspath(model)).name if Path(model).exists() else model
