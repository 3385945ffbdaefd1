"""Cancellation of a request's work when its client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline.server.apis import Api
from paceline.server.errors import ClientGoneError, http_error_of

Result = TypeVar("Result")


async def cancel_on_disconnect(request: Request, work: Awaitable[Result]) -> Result:
    """Return what `work` returns; cancel it and raise ClientGoneError when the client disconnects."""
    return await _first(work, request.receive)


class EventStream(StreamingResponse):
    """A stream of events whose source is closed when the client disconnects. An error of the source becomes its last event.

    Args:
        first: the first event, which has been taken from `events`.
        events: yields further whole events.
        api: of the stream and its error.
    """

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], api: Api) -> None:
        self._events = _with_error(first, events, api)
        headers = {"X-Accel-Buffering": "no"}  # a proxy must not hold events back
        super().__init__(self._events, media_type=api.media_type, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await _first(self.stream_response(send), receive)


async def _with_error(first: bytes, events: AsyncGenerator[bytes, None], api: Api) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        if first:
            yield first
        try:
            async for event in events:
                yield event
        except Exception as error:
            yield api.error_event(http_error_of(error))


async def disconnected(receive: Receive) -> None:
    """Return when the client disconnects; its request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first(work: Awaitable[Result], receive: Receive) -> Result:
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)
