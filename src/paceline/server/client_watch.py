"""Noticing that a client has gone away, and giving up what was done for it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline.server.http_errors import ClientGoneError

Result = TypeVar("Result")


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns; it is cancelled as soon as the client goes away.

    Raises:
        ClientGoneError: it went away first.
    """
    return await _first(work, request.receive)


class EventStream(StreamingResponse):
    """A stream of events, whose source is closed as soon as the client goes away.

    Args:
        events: yields whole events.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], media_type: str) -> None:
        super().__init__(events, media_type=media_type, headers={"X-Accel-Buffering": "no"})  # a proxy must not hold events back
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await _first(self.stream_response(send), receive)


async def within(timeout_s: float, work: Awaitable[Result]) -> Result:
    """What `work` gives.

    Before Python 3.12 `asyncio.wait_for` loses a cancellation that comes together with the result: a client that goes away between two
    tokens would be served to the end.

    Raises:
        asyncio.TimeoutError: it takes longer; it was cancelled.
    """
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({working}, timeout=timeout_s)
        if working.done():
            return working.result()
        raise asyncio.TimeoutError
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def until_gone(receive: Receive) -> None:
    """Wait until the client goes away; its request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)
