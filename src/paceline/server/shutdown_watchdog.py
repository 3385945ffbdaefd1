"""Exit of a process that does not end by itself, such as one whose event loop is blocked."""

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import TracebackType

EXIT_CODE = 1


class ShutdownWatchdog:
    """A thread that exits the process at a deadline.

    Args:
        end: exits the process at once, with a code.
    """

    def __init__(self, end: Callable[[int], object] = os._exit) -> None:
        self._end = end
        self._deadlines: SimpleQueue[float | None] = SimpleQueue()  # reentrant: safe in signal handlers
        self._thread = threading.Thread(target=self._watch, name="paceline-watchdog", daemon=True)

    def __enter__(self) -> "ShutdownWatchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._deadlines.put(None)

    def exit_within(self, seconds: float) -> None:
        """Set the deadline; a later call replaces it. Signal handlers may call this."""
        self._deadlines.put(seconds)

    def _watch(self) -> None:
        seconds: float | None = None
        while True:
            try:
                seconds = self._deadlines.get(timeout=seconds)
            except Empty:
                self._end(EXIT_CODE)
                return
            if seconds is None:
                return
