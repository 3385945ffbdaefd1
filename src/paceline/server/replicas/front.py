"""The one way in to several replicas: the checks of the door, and a way for every request to the replica that suits it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from paceline import __version__
from paceline.server.client_watch import EventStream, unless_gone
from paceline.server.dialects import Dialect, dialect_of, tell_errors
from paceline.server.door import Door
from paceline.server.gate import Gate
from paceline.server.http_errors import http_error_of
from paceline.server.in_process import REQUEST_ID
from paceline.server.replicas.merged_metrics import merged_metrics
from paceline.server.replicas.pool import Head, Question, ReplicaLostError, ReplicaPool, no_replica, replica_lost
from paceline.server.replicas.routing import prefix_key
from paceline.server.settings import ServerSettings

FORWARDED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/openapi.json",
)
"""Paths that the log names; others are forwarded as well."""
METRICS_S = 5.0
_OWN_HEADERS = (b"content-length", b"x-request-id")  # made anew here
_KEPT_HEADERS = (
    *(b"host", b"content-type", b"content-length", b"content-encoding", b"transfer-encoding", b"connection", b"keep-alive", b"te"),
    *(b"trailer", b"upgrade", b"expect", b"proxy-authorization", b"authorization", b"x-api-key", b"cookie"),
)
"""Headers of a client that were dealt with here: about the connection, or who it is."""


@dataclass(frozen=True, slots=True)
class FrontService:
    """What a server that runs a front needs of it; `engine` is what ends with it."""

    engine: ReplicaPool
    settings: ServerSettings
    model: str
    gate: Gate


def create_front(pool: ReplicaPool, settings: ServerSettings, model: str, num_samples: int) -> FastAPI:
    """An ASGI application that answers with the replicas of `pool`; its `state.service` is a `FrontService`.

    Args:
        pool: stays the caller's, who closes it.
        model: the name that is served.
        num_samples: requests that all replicas together take at a time.
    """
    service = FrontService(pool, settings, model, Gate(num_samples, settings.max_queue))
    app = FastAPI(title="paceline", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    _add_state_routes(app, service)

    async def forward(request: Request) -> Response:
        return await _forward(service, request)

    for path in (*FORWARDED, "/{path:path}"):
        app.add_api_route(path, forward, methods=["GET", "POST"])
    tell_errors(app)
    app.add_middleware(Door, settings=settings)
    return app


def _add_state_routes(app: FastAPI, service: FrontService) -> None:
    """What watchers ask: the same paths as those of one server."""

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """200 while the front runs: replicas that end are restarted without it."""
        return JSONResponse({"status": "ok", "replicas": await service.engine.num_running()})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """200 while requests are taken and a replica is there to answer them."""
        if service.gate.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        running = await service.engine.num_running()
        return JSONResponse({"status": "ok" if running else "starting", "replicas": running}, 200 if running else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Those of all replicas, told apart by their label `engine`."""
        names = await service.engine.names()
        pages = await asyncio.gather(*(_metrics_of(service.engine, name) for name in names))
        found = {name: page for name, page in zip(names, pages, strict=True) if page is not None}
        return Response(merged_metrics(found), media_type=CONTENT_TYPE_LATEST)


async def _metrics_of(pool: ReplicaPool, name: str) -> str | None:
    """The page of one replica; None where it does not answer."""

    async def whole() -> bytes:
        async with aclosing(pool.ask(Question("GET", "/metrics", replica=name))) as parts:
            return b"".join([part if isinstance(part, bytes) else part.body async for part in parts])

    try:
        return (await asyncio.wait_for(whole(), METRICS_S)).decode()
    except (TimeoutError, ReplicaLostError):
        return None


async def _forward(service: FrontService, request: Request) -> Response:
    body = await request.body()
    key = await asyncio.to_thread(prefix_key, body) if body else None
    question = Question(
        request.method,
        request.url.path,
        body,
        request.scope["query_string"],
        tuple((name, value) for name, value in request.headers.raw if name.lower() not in _KEPT_HEADERS),
        request.scope[REQUEST_ID],
        key,
    )
    parts = _parts(service, question)
    async with _closed_on_error(parts):
        head = await unless_gone(request, _next(parts))
        assert isinstance(head, Head)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers if name.lower() not in _OWN_HEADERS}
        if head.is_stream:
            dialect = dialect_of(request.url.path)
            stream = EventStream(_events(parts, dialect), dialect.media_type)
            stream.headers.update(headers)
            return stream
        content = head.body + await unless_gone(request, _rest(parts))
        return Response(content, head.status, headers)


async def _parts(service: FrontService, question: Question) -> AsyncGenerator[Head | bytes, None]:
    """Head and body of an answer, while the gate holds a place for it.

    Raises:
        HttpError: it is not let in, or its replica ended.
    """
    with service.gate.admitted(1):
        if not await service.engine.num_running():
            raise no_replica()
        async with aclosing(service.engine.ask(question)) as parts:
            try:
                async for part in parts:
                    yield part
            except ReplicaLostError:
                raise replica_lost() from None


class _closed_on_error:  # noqa: N801  # reads as a block
    """Closes a generator if the block fails: a stream that was returned closes it later."""

    def __init__(self, parts: AsyncGenerator[Head | bytes, None]) -> None:
        self._parts = parts

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            await self._parts.aclose()


async def _next(parts: AsyncGenerator[Head | bytes, None]) -> Head | bytes:
    return await anext(parts)


async def _rest(parts: AsyncGenerator[Head | bytes, None]) -> bytes:
    """What follows the head; nothing is sent on before it is whole, so that an error has a status of its own."""
    return b"".join([part async for part in parts if isinstance(part, bytes)])


async def _events(parts: AsyncGenerator[Head | bytes, None], dialect: Dialect) -> AsyncGenerator[bytes, None]:
    """A stream as it comes; if its replica ends, its last event says so."""
    async with aclosing(parts):
        try:
            async for part in parts:
                if isinstance(part, bytes):
                    yield part
        except Exception as error:
            yield dialect.last_words(http_error_of(error))
