"""The end of a process that was told to end, whatever holds its event loop up."""

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import TracebackType

EXIT_CODE = 1


class ShutdownWatchdog:
    """A thread that ends the process where it does not end by itself: nothing of it runs in the loop that may be blocked.

    Args:
        end: ends the process with this exit code, without asking anybody.
    """

    def __init__(self, end: Callable[[int], object] = os._exit) -> None:
        self._end = end
        self._told: SimpleQueue[float | None] = SimpleQueue()  # which a signal's handler may use wherever it interrupts
        self._thread = threading.Thread(target=self._watch, name="paceline-end", daemon=True)

    def __enter__(self) -> "ShutdownWatchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._told.put(None)

    def exit_within(self, seconds: float) -> None:
        """The process ends within this time, or is ended; a later call counts alone. Signal handlers may call it."""
        self._told.put(seconds)

    def _watch(self) -> None:
        seconds: float | None = None
        while True:
            try:
                seconds = self._told.get(timeout=seconds)
            except Empty:
                self._end(EXIT_CODE)
                return
            if seconds is None:
                return
