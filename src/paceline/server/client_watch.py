"""Noticing that a client has gone away, and giving up what was done for it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
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

    It runs in the caller's own task: one more for every token of every stream would cost more than the rest of an event. A cancellation
    from outside is never lost, whatever else happens at the same time, as it may be in `asyncio.wait_for` before Python 3.12.

    Raises:
        asyncio.TimeoutError: it takes longer; it was cancelled.
    """
    task, is_late = asyncio.current_task(), False
    assert task is not None

    def end() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(timeout_s, end)
    try:
        return await work
    except asyncio.CancelledError:
        if not is_late or _is_cancelled_besides(task):
            raise
        raise TimeoutError from None
    finally:
        timer.cancel()


def _is_cancelled_besides(task: "asyncio.Task[object]") -> bool:
    """Take one cancellation of a task back; whether there is another. Python 3.10 does not count them: there it is late."""
    uncancel: Callable[[], int] | None = getattr(task, "uncancel", None)
    return uncancel is not None and uncancel() > 0


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
