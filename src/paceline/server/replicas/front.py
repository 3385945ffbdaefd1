"""The HTTP front of several replicas: the checks of one server, and routing of every request to a replica."""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from paceline import __version__
from paceline.server.admission import AdmissionControl
from paceline.server.apis import api_of, handle_errors
from paceline.server.asgi_client import REQUEST_ID, ForwardedRequest
from paceline.server.disconnect import EventStream, cancel_on_disconnect
from paceline.server.errors import unavailable
from paceline.server.metrics import merged_pages
from paceline.server.middleware import add_middleware
from paceline.server.replicas.replica import ReplicaLostError, ReplicaPool, ResponseHead
from paceline.server.replicas.routing import prefix_key
from paceline.server.settings import ServerSettings

_ENGINE = re.compile(r'(?<=[{,])engine="[^"]*"')


def merged_metrics(pages: Mapping[str, str]) -> str:
    """Merge pages of metrics by family; the label `engine` is the name of the replica.

    Args:
        pages: Prometheus's text form by the name of the replica.
    """
    return merged_pages(
        "\n".join(line if line.startswith("#") else _ENGINE.sub(f'engine="{replica}"', line, count=1) for line in page.splitlines())
        for replica, page in pages.items()
    )


FORWARDED = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate",
    "/v1/models", "/tokenize", "/detokenize", "/openapi.json",
)  # fmt: skip
"""Paths that are named in the log; all others are forwarded too."""
METRICS_S = 5.0
RETRY_S = 2
_OWN_HEADERS = (b"content-length", b"x-request-id")  # made anew here
_KEPT_HEADERS = (
    *(b"host", b"content-type", b"content-length", b"content-encoding", b"transfer-encoding", b"connection", b"keep-alive", b"te"),
    *(b"trailer", b"upgrade", b"expect", b"proxy-authorization", b"authorization", b"x-api-key", b"cookie"),
)
"""Headers that the front handles: of the connection, and credentials."""


@dataclass(frozen=True, slots=True)
class FrontService:
    """Implements `ServedService` for a front, so that `serve_application` can run it."""

    engine: ReplicaPool
    settings: ServerSettings
    model: str
    admission: AdmissionControl

    async def close(self) -> None:
        """End all replicas."""
        await self.engine.close()


def create_front(pool: ReplicaPool, settings: ServerSettings, model: str, num_samples: int) -> FastAPI:
    """Return an ASGI application that forwards requests to `pool`; its `state.service` is a `FrontService`.

    Args:
        pool: the caller closes it.
        model: the served name.
        num_samples: requests that all replicas together run at a time.
    """
    service = FrontService(pool, settings, model, AdmissionControl(num_samples, settings.max_queue))
    app = FastAPI(title="paceline", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    _add_state_routes(app, service)

    async def forward(request: Request) -> Response:
        return await _forward(service, request)

    for path in (*FORWARDED, "/{path:path}"):
        app.add_api_route(path, forward, methods=["GET", "POST"])
    handle_errors(app)
    add_middleware(app, settings, service.admission)
    return app


def _add_state_routes(app: FastAPI, service: FrontService) -> None:
    """Add the routes of monitoring, as one server has them."""

    @app.get("/health")
    async def health() -> Response:
        """200 while the front runs; Ray restarts replicas."""
        return JSONResponse({"status": "ok", "replicas": await service.engine.num_running()})

    @app.get("/ready")
    async def ready() -> Response:
        """200 while requests are accepted and a replica runs."""
        if service.admission.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        running = await service.engine.num_running()
        return JSONResponse({"status": "ok" if running else "starting", "replicas": running}, 200 if running else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """The metrics of all replicas, with the label `engine`."""
        names = await service.engine.names()
        pages = await asyncio.gather(*(_metrics_of(service.engine, name) for name in names))
        found = {name: page for name, page in zip(names, pages, strict=True) if page is not None}
        return Response(merged_metrics(found), media_type=CONTENT_TYPE_LATEST)


async def _metrics_of(pool: ReplicaPool, name: str) -> str | None:
    """Return the metrics of one replica; None if it does not answer."""

    async def whole() -> bytes:
        async with aclosing(pool.forward(ForwardedRequest("GET", "/metrics", replica=name))) as parts:
            return b"".join([part if isinstance(part, bytes) else part.body async for part in parts])

    try:
        return (await asyncio.wait_for(whole(), METRICS_S)).decode()
    except (TimeoutError, ReplicaLostError):
        return None


async def _forward(service: FrontService, request: Request) -> Response:
    body = await request.body()
    key = await asyncio.to_thread(prefix_key, body) if body else None
    forwarded = ForwardedRequest(
        request.method,
        request.url.path,
        body,
        request.scope["query_string"],
        tuple((name, value) for name, value in request.headers.raw if name.lower() not in _KEPT_HEADERS),
        request.scope[REQUEST_ID],
        key,
    )
    parts = _parts(service, forwarded)
    try:
        head = await cancel_on_disconnect(request, anext(parts))
        assert isinstance(head, ResponseHead)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers if name.lower() not in _OWN_HEADERS}
        if head.is_stream:
            stream = EventStream(head.body, cast("AsyncGenerator[bytes, None]", parts), api_of(request.url.path))
            stream.headers.update(headers)
            return stream
        content = head.body + await cancel_on_disconnect(request, _read_rest(parts))
        return Response(content, head.status, headers)
    except BaseException:  # otherwise the stream that is returned closes it
        await parts.aclose()
        raise


async def _parts(service: FrontService, forwarded: ForwardedRequest) -> AsyncGenerator[ResponseHead | bytes, None]:
    """Yield head and body of an admitted request; HttpError if it is refused or its replica ended."""
    with service.admission.admitted(1):
        if not await service.engine.num_running():
            raise unavailable("no replica is running yet: send the request again soon", "no_replica", RETRY_S)
        async with aclosing(service.engine.forward(forwarded)) as parts:
            try:
                async for part in parts:
                    yield part
            except ReplicaLostError:
                text = "the replica of this request ended and is being restarted: send the request again"
                raise unavailable(text, "replica_lost", RETRY_S) from None


async def _read_rest(parts: AsyncGenerator[ResponseHead | bytes, None]) -> bytes:
    """Return the rest of a body. It is sent only when it is whole, so that an error can still have its own status."""
    return b"".join([part async for part in parts if isinstance(part, bytes)])
