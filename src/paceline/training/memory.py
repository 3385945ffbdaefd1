"""Measures the peak memory of this process while a block of code runs."""

import threading
from types import TracebackType

from paceline.machine import private_memory_bytes

_INTERVAL_S = 0.02


class MemoryWatch:
    """Context manager that samples the memory of this process every 20 ms in a thread. It is used once.

    Attributes:
        peak_bytes: the most so far, as of `private_memory_bytes`; 0 before the block is entered.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, private_memory_bytes())
