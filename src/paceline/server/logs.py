"""Log and notices on stderr, written by a thread: a pipe that is not read must not block the event loop, nor the end of the process."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from typing import IO, Any

from paceline.errors import printable

MAX_WAITING = 10_000
"""Lines that wait to be written; further ones are dropped, and counted."""
CLOSE_TIMEOUT_S = 1.0


class DroppingQueueHandler(QueueHandler):
    """Queues records for a listener, and drops them while the queue is full.

    Attributes:
        num_dropped: records that were dropped since the last line was written.
    """

    def __init__(self, queue: "Queue[Any]") -> None:
        super().__init__(queue)
        self.num_dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            super().enqueue(record)
        except Full:
            self.num_dropped += 1

    def print_line(self, text: str) -> None:
        """Write a line for the person who started the server, whatever the level of the log."""
        self.handle(logging.makeLogRecord({"msg": printable(text)}))


class LineWriter(QueueListener):
    """Writes the records of a handler as lines, in a thread of its own. It is no `Handler`, whose lock `logging.shutdown` would wait for.

    Args:
        write: takes bytes; may block.
    """

    def __init__(self, write: Callable[[bytes], None], source: DroppingQueueHandler) -> None:
        super().__init__(source.queue)
        self._write, self._source = write, source
        self._is_closed = False

    def handle(self, record: logging.LogRecord) -> None:
        if self._is_closed:
            return
        lines = [record.getMessage()]
        if num_dropped := self._source.num_dropped:
            self._source.num_dropped = 0
            lines.append(f"{num_dropped} log lines were dropped: stderr was not read fast enough")
        try:
            self._write("".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))
        except (OSError, ValueError):  # the reader has closed the pipe
            self._is_closed = True


@contextmanager
def queued_lines(write: Callable[[bytes], None], max_waiting: int = MAX_WAITING) -> Iterator[DroppingQueueHandler]:
    """Start a thread that writes the handler's records. At the end, wait at most a second for it."""
    queued = DroppingQueueHandler(Queue(max_waiting))
    listener = LineWriter(write, queued)
    listener.start()

    def stop() -> None:
        with suppress(Full):  # the listener is stuck, and so is a stop without its sentinel
            listener.stop()

    try:
        yield queued
    finally:
        stopping = threading.Thread(target=stop, name="paceline-log-stop", daemon=True)
        stopping.start()
        stopping.join(CLOSE_TIMEOUT_S)


@contextmanager
def log_to_stderr(level: int) -> Iterator[DroppingQueueHandler]:
    """Send the server's log, and warnings of every library, to stderr within this block."""
    server, root = logging.getLogger("paceline.server"), logging.getLogger()
    with queued_lines(_bytes_writer(sys.stderr)) as queued:
        server.handlers, server.propagate = [queued], False
        server.setLevel(level)
        root.addHandler(queued)  # without a handler Python itself writes warnings, and blocks
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # its lines about clients are not JSON
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every write to a client that has disconnected
        try:
            yield queued
        finally:
            root.removeHandler(queued)
            server.removeHandler(queued)


def _bytes_writer(stream: IO[str]) -> Callable[[bytes], None]:
    """Return a function that bypasses Python's buffer: a stuck thread would hold its lock while the interpreter ends."""
    try:
        handle = stream.fileno()
    except (OSError, ValueError):  # not a file

        def write_text(content: bytes) -> None:
            stream.write(content.decode())

        return write_text

    def write(content: bytes) -> None:
        while content:
            content = content[os.write(handle, content) :]

    return write
