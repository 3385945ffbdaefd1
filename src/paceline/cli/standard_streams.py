"""Standard streams as every command expects them: open, and with one error for an output that cannot be written."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class StdoutError(OSError):
    """Standard output cannot be written. It is an OSError so that a conversation does not go on after it."""

    def __str__(self) -> str:
        return f"standard output cannot be written ({self.strerror})"


class _Stdout(io.FileIO):
    """Standard output whose errors are distinguishable from those of other files."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise StdoutError(error.errno, error.strerror) from None


class _Stderr(io.FileIO):
    """Standard error that drops what cannot be written: no notice may end an answer."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError:
            return memoryview(content).nbytes


def prepare_streams() -> None:
    """Replace closed streams by devnull, and make a failed write a StdoutError on stdout and nothing on stderr."""
    for number in range(3):
        _fill_descriptor(number)
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    # a terminal that cannot show a character must not end the program
    sys.stdout = _prepared(sys.stdout, _Stdout, "replace")
    sys.stderr = _prepared(sys.stderr, _Stderr, "backslashreplace")


def _fill_descriptor(number: int) -> None:
    """Open devnull as a closed descriptor, so that no file opened later gets its number and a library's messages."""
    try:
        os.fstat(number)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
        os.set_inheritable(number, True)


def _prepared(stream: TextIO | None, kind: type[io.FileIO], errors: str) -> TextIO:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.reconfigure(errors=errors)
    raw = getattr(stream.buffer, "raw", stream.buffer)  # Python's option -u leaves out the buffer
    if type(raw) is not io.FileIO:  # a Windows console
        return stream
    stream.flush()
    own = kind(raw.fileno(), "w", closefd=False)
    is_buffered = raw is not stream.buffer
    return io.TextIOWrapper(
        io.BufferedWriter(own) if is_buffered else own,
        encoding=stream.encoding,
        errors=errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def drop_stdout() -> None:
    """Redirect stdout to devnull, so that the interpreter's last flush does not fail."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def flushed_stdout() -> Iterator[None]:
    """Flush stdout at the end, whatever ends it.

    Raises:
        StdoutError, BrokenPipeError: it cannot be written. What was not written is dropped.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except (StdoutError, BrokenPipeError):
        drop_stdout()
        raise
