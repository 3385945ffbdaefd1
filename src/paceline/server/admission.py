"""Admission control: how many samples may be in the server, and which requests run while it shuts down."""

import asyncio
import math
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from paceline.server.errors import HttpError, unavailable

MAX_RETRY_S = 60
_SMOOTHING = 0.2  # weight of the newest request in the mean duration
_CURRENT_REQUEST = ContextVar[object]("request")


class AdmissionControl:
    """Counts the samples that run or wait, and refuses those beyond the limit. Belongs to one event loop.

    Args:
        num_running: samples that the engine runs at a time.
        max_queue: samples that may wait in addition.

    Attributes:
        limit: samples that may be in the server at a time.
        num_open: samples that run or wait.
        is_draining: whether the server is shutting down: running requests are finished, new ones are refused.
    """

    def __init__(self, num_running: int, max_queue: int) -> None:
        self._num_running, self.limit = num_running, num_running + max_queue
        self.num_open = 0
        self._admitted = set[object]()  # requests that a drain waits for
        self._requests = set["asyncio.Task[None]"]()
        self.is_draining = False
        self._mean_s = 1.0
        self._idle = asyncio.Event()

    @contextmanager
    def admitted(self, num_samples: int, parameter: str = "n") -> Iterator[None]:
        """Count samples during this block. A drain waits until the request is answered, even if it has no samples.

        Args:
            parameter: the request's field that sets the number.

        Raises:
            HttpError: 503 while it drains, unless the request was admitted before (to load its model); 429 if the queue is full; 400 if
                they can never fit.
        """
        own_request = object()
        request = _CURRENT_REQUEST.get(own_request)
        if self.is_draining and request not in self._admitted:
            raise unavailable("the server is shutting down: retry later", "draining", MAX_RETRY_S)
        if num_samples > self.limit:
            text = f"{parameter} requests {num_samples} samples, and the server holds at most {self.limit} at a time: request fewer"
            raise HttpError(400, text, parameter=parameter)
        if self.num_open + num_samples > self.limit:
            retry_s = min(MAX_RETRY_S, max(1, math.ceil(self._mean_s * num_samples / self._num_running)))
            raise HttpError(
                429,
                f"the queue is full: {self.num_open} of at most {self.limit} samples are running or waiting; retry in {retry_s} s",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(retry_s)},
            )
        self.num_open += num_samples
        self._admitted.add(request)
        try:
            yield
        finally:
            self.num_open -= num_samples
            if request is own_request:  # no HTTP request: `run_request` would know its end
                self._release(request)

    def _release(self, request: object) -> None:
        self._admitted.discard(request)
        if not self._admitted:
            self._idle.set()

    async def run_request(self, request: Awaitable[None]) -> None:
        """Await a request as a task that `abort` can cancel.

        Raises:
            HttpError: `abort` cancelled it; the status is 503.
        """
        admitted_request, current = object(), asyncio.current_task()
        token = _CURRENT_REQUEST.set(admitted_request)
        task = asyncio.ensure_future(request)  # with a copy of the context, which its own tasks copy in turn
        _CURRENT_REQUEST.reset(token)
        self._requests.add(task)
        try:
            await task
        except asyncio.CancelledError:
            if task in self._requests or (current is not None and current.cancelling()):
                raise
            raise shutting_down() from None
        finally:
            self._requests.discard(task)
            self._release(admitted_request)

    def abort(self) -> None:
        """Cancel all requests that run; each answers with `shutting_down`."""
        while self._requests:
            self._requests.pop().cancel()

    def record_duration(self, seconds: float) -> None:
        """Record how long a request took, to estimate `Retry-After`."""
        self._mean_s += _SMOOTHING * (seconds - self._mean_s)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the admitted ones; after `timeout_s` abort them and return False."""
        self.is_draining = True
        if not self._admitted:
            return True
        self._idle.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self.abort()
            return False
        return True


def shutting_down() -> HttpError:
    """Return the error of a request that the shutdown ended before it was answered."""
    return unavailable("the server shut down before this request was finished: retry later", "shutting_down", MAX_RETRY_S)
