"""Calling an ASGI application in its own process, with a streamed response. `httpx.ASGITransport` returns nothing before the end."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

REQUEST_ID = "paceline.request_id"
"""Key of a scope for the id of a forwarded request; clients cannot set it."""
_HEADERS = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A request that is passed to an application in this process, or by a front to a replica.

    Attributes:
        query: the query string.
        headers: in addition to Host and Content-Type; of a client's, those of its connection and its credentials are left out.
        request_id: for the response and the log; None = a new one.
        key: hash of the beginning of the prompt, for `choose_replica`.
        replica: name of the replica that must answer; None = any.
    """

    method: str
    path: str
    body: bytes = b""
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    request_id: str | None = None
    key: int | None = None
    replica: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A response of an application.

    Attributes:
        parts: the body, as it comes.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    parts: AsyncGenerator[bytes, None]

    def header(self, name: bytes) -> str:
        """Return the value of a header, or ""."""
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == name), "")

    async def body(self) -> bytes:
        return b"".join([part async for part in self.parts])


@asynccontextmanager
async def call_app(app: ASGIApp, request: ForwardedRequest) -> AsyncIterator[Answer]:
    """Yield the response to one request. Leaving the block early cancels the request, as a disconnect does.

    Raises:
        RuntimeError: the application ended without an answer.
    """
    sent = asyncio.Queue[Message | None]()
    gone = asyncio.Event()
    bodies = iter([request.body])

    async def receive() -> Message:
        for whole in bodies:
            return {"type": "http.request", "body": whole, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(_scope(request), receive, sent.put)
        finally:
            sent.put_nowait(None)

    running = asyncio.ensure_future(run())
    try:
        start = await sent.get()
        if start is None:
            await running
            raise RuntimeError("the application ended without an answer")
        async with aclosing(_parts(sent, running)) as parts:
            yield Answer(start["status"], list(start["headers"]), parts)
    finally:
        gone.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _parts(sent: "asyncio.Queue[Message | None]", running: "asyncio.Future[None]") -> AsyncGenerator[bytes, None]:
    while (message := await sent.get()) is not None:
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body", False):
            break
    await running


async def batched_parts(parts: AsyncGenerator[bytes, None], window_s: float) -> AsyncGenerator[bytes, None]:
    """Join parts that arrive within `window_s`; the first one is passed on at once."""
    came = asyncio.Queue[bytes | Exception | None]()

    async def read() -> None:
        try:
            async for part in parts:
                came.put_nowait(part)
            came.put_nowait(None)
        except Exception as error:
            came.put_nowait(error)

    reading = asyncio.ensure_future(read())
    try:
        while True:
            batch = [await came.get()]
            while not came.empty():
                batch.append(came.get_nowait())
            if content := b"".join(part for part in batch if isinstance(part, bytes)):
                yield content
            if isinstance(last := batch[-1], Exception):
                raise last
            if last is None:
                return
            await asyncio.wait({reading}, timeout=window_s)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _scope(request: ForwardedRequest) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": [*_HEADERS, *request.headers],
        REQUEST_ID: request.request_id,
        "client": None,
        "server": None,
    }
