"""Lines on stderr that nobody waits for: a pipe that is not read would stop the event loop at a line of log, and with it every client."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Full, Queue
from typing import IO

from paceline.errors import printable

MAX_WAITING = 10_000
"""Lines that wait to be written; further ones are dropped, and counted."""
_CLOSE_S = 1.0


class LineWriter(logging.Handler):
    """Writes lines in a thread of its own.

    Args:
        write: takes bytes, and may take as long as it likes.
    """

    def __init__(self, write: Callable[[bytes], None], max_waiting: int = MAX_WAITING) -> None:
        super().__init__()
        self._write = write
        self._lines: Queue[str | None] = Queue(max_waiting)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="paceline-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._put(self.format(record))
        except Exception:
            self.handleError(record)

    def say(self, text: str) -> None:
        """A line for the person who started the server."""
        self._put(printable(text))

    def close(self) -> None:
        """Write what waits, for a second at most."""
        try:
            self._lines.put_nowait(None)
        except Full:
            pass
        else:
            self._thread.join(_CLOSE_S)
        super().close()

    def _put(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except Full:
            self._num_dropped += 1

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            if self._num_dropped:
                num_dropped, self._num_dropped = self._num_dropped, 0
                line += f"\n{num_dropped} lines were dropped: nobody read them"
            try:
                self._write(line.encode("utf-8", "backslashreplace") + b"\n")
            except (OSError, ValueError):  # nobody will read it any more
                return


@contextmanager
def log_to_stderr(level: int) -> Iterator[LineWriter]:
    """The server's own lines go to stderr in this block, and what goes wrong below it."""
    writer = LineWriter(_bytes_writer(sys.stderr))
    writer.setFormatter(logging.Formatter("%(message)s"))
    own, everything = logging.getLogger("paceline.server"), logging.getLogger()
    own.handlers, own.propagate = [writer], False
    own.setLevel(level)
    everything.addHandler(writer)  # else Python itself writes what others warn of, and waits
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what it says of clients is no line of JSON
    try:
        yield writer
    finally:
        everything.removeHandler(writer)
        own.removeHandler(writer)
        writer.close()


def _bytes_writer(stream: IO[str]) -> Callable[[bytes], None]:
    """Writes below Python's own buffer, whose lock a thread that is stuck would hold when the process ends."""
    try:
        handle = stream.fileno()
    except (OSError, ValueError):  # it is no file

        def keep(content: bytes) -> None:
            stream.write(content.decode())

        return keep

    def write(content: bytes) -> None:
        while content:
            content = content[os.write(handle, content) :]

    return write
