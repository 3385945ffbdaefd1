"""How many samples may be in the server, and whether it still takes any."""

import asyncio
import math
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from paceline.server.client_watch import within
from paceline.server.http_errors import HttpError

MAX_RETRY_S = 60
_SMOOTHING = 0.2  # weight of the newest request in the mean of their times
Result = TypeVar("Result")


class Gate:
    """Counts the samples that are running or wait, and refuses what is too much. Belongs to one event loop.

    Args:
        num_running: samples that the engine runs at a time.
        max_queue: samples that may wait besides.

    Attributes:
        is_draining: whether the server is about to end: what is in it is finished, nothing new is taken.
    """

    def __init__(self, num_running: int, max_queue: int) -> None:
        self._num_running, self._max_queue = num_running, max_queue
        self.num_open = 0
        self._num_inside = 0  # blocks, those without samples too
        self._works = set["asyncio.Future[Any]"]()
        self.is_draining = False
        self._mean_s = 1.0
        self._idle: asyncio.Event | None = None

    @property
    def limit(self) -> int:
        """Samples that may be in the server at a time."""
        return self._num_running + self._max_queue

    @contextmanager
    def admitted(self, num_samples: int, parameter: str = "n") -> Iterator[None]:
        """Samples that are in the server during this block, which a drain waits for, with none too.

        Args:
            parameter: of the request, that says how many.

        Raises:
            HttpError: 503 while it drains, 429 where the queue is full, 400 where they never fit.
        """
        if self.is_draining:
            raise _draining("the server is about to end")
        limit = self.limit
        if num_samples > limit:
            raise HttpError(
                400, f"{num_samples} samples are asked for, and the server holds {limit} at a time: ask for fewer", parameter=parameter
            )
        if self.num_open + num_samples > limit:
            retry_s = min(MAX_RETRY_S, max(1, math.ceil(self._mean_s * num_samples / self._num_running)))
            raise HttpError(
                429,
                f"{self.num_open} samples are running or wait, and the server holds {limit}: ask again in {retry_s} s",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(retry_s)},
            )
        self.num_open += num_samples
        self._num_inside += 1
        try:
            yield
        finally:
            self.num_open -= num_samples
            self._num_inside -= 1
            if not self._num_inside and self._idle is not None:
                self._idle.set()

    async def finished(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What `work` gives, which the engine's end would not end; it is given up where a drain takes too long.

        Raises:
            HttpError: 503, it was given up.
        """
        working = asyncio.ensure_future(work)
        self._works.add(working)
        try:
            return await working
        except asyncio.CancelledError:
            if working in self._works:
                raise
            raise _draining("the server ended before this request did") from None
        finally:
            self._works.discard(working)

    def record(self, seconds: float) -> None:
        """How long a request took; the advice when to ask again follows it."""
        self._mean_s += _SMOOTHING * (seconds - self._mean_s)

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, and wait until nothing is left; False where that takes longer than `timeout_s`: what is left is given up."""
        self.is_draining = True
        self._idle = self._idle or asyncio.Event()
        if not self._num_inside:
            return True
        try:
            await within(timeout_s, self._idle.wait())
        except TimeoutError:
            while self._works:
                self._works.pop().cancel()
            return False
        return True


def _draining(text: str) -> HttpError:
    headers = {"Retry-After": str(MAX_RETRY_S)}
    return HttpError(503, f"{text}: ask again later", kind="service_unavailable_error", code="draining", headers=headers)
