"""The output file of a batch: one writer, whole lines only, continued by later runs."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from paceline.errors import CapacityError, ConfigError, RequestError

_BEGINNING = b'{"id":"batch_req_'
_HEAD_BYTES = 200  # first bytes of a line, by which lines of a batch are recognised
_CHUNK_BYTES = 1 << 20


@dataclass(slots=True)
class Finished:
    """Content of an output file.

    Attributes:
        ids: the line's id by its custom_id.
        num_by_status: answers by their HTTP status.
        models: that answered.
    """

    ids: dict[str, str] = field(default_factory=dict)
    num_by_status: dict[int, int] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)

    def add(self, line: Mapping[str, Any]) -> None:
        """Count a line; KeyError, TypeError or AttributeError if a batch has not written it."""
        response = line["response"]
        status, model = int(response["status_code"]), response["body"].get("model")
        self.ids[line["custom_id"]] = line["id"]
        self.num_by_status[status] = self.num_by_status.get(status, 0) + 1
        if model is not None:
            self.models.add(model)


class OutputFile:
    """A file that grows by whole lines.

    A line reaches the system in one write, so that a process that is killed loses none that was written; `sync` makes them survive a loss
    of power. Whatever ended the last run, what it left half written at the end is cut off when the file is opened.

    Args:
        path: created if it does not exist; locked against other writers while this object is open.

    Raises:
        ConfigError: another run is writing it, or its content is not a batch's output, each answer once.
        RequestError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():
            raise RequestError(f"the output {path} is no regular file, and a run that goes on reads it: give a file")
        self._is_new = not path.exists()
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
            self._file: BinaryIO = os.fdopen(handle, "r+b", buffering=0)
        except OSError as error:
            raise RequestError(f"the output file {path} cannot be written ({error.strerror}): give another one") from None
        try:
            _lock(self._file, path)
            self.finished = Finished()
            self._end = self._read_earlier_lines()
            self._file.truncate(self._end)
            self._file.seek(self._end)
        except BaseException:
            self._file.close()
            raise
        self._is_synced = False

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        is_left_over = kind is not None and self._is_new and self._end == 0  # a refused run leaves no file
        if is_left_over and sys.platform != "win32":
            self.path.unlink(missing_ok=True)  # while this process has the lock
        self.close()
        if is_left_over and sys.platform == "win32":
            self.path.unlink(missing_ok=True)

    def append(self, line: Mapping[str, Any]) -> None:
        """Write an answer; CapacityError, and no part of the line, if the disk is full."""
        content = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        try:
            written = 0
            while written < len(content):  # on a nearly full disk, a write may be partial and the next one fail
                written += self._file.write(content[written:]) or 0
        except OSError as error:
            raise CapacityError(f"{self.path} cannot be written ({error.strerror}): make room and run the same command again") from None
        self._end += len(content)
        self._is_synced = False
        self.finished.add(line)

    def sync(self) -> None:
        """Make what was written survive a loss of power. May be called in a thread."""
        if not self._is_synced:
            self._is_synced = True
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Remove an incomplete last line, sync, and release the lock."""
        if not self._file.closed:
            try:
                self._file.truncate(self._end)
                self.sync()
            finally:
                self._file.close()

    def _read_earlier_lines(self) -> int:
        """Read the lines of earlier runs and return the length of the whole ones; ConfigError if they are not a batch's."""
        end = 0
        for number, line in enumerate(_lines(self._file), 1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError
                fields = json.loads(line)
                is_second = fields["custom_id"] in self.finished.ids
                self.finished.add(fields)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                self._check_tail(line, number)
                break
            if is_second:
                text = f"line {number} of {self.path} answers {fields['custom_id']!r} a second time"
                raise ConfigError(f"{text}: remove one of the two, or give another output file")
            end += len(line)
        return end

    def _check_tail(self, line: bytes, number: int) -> None:
        """Check that an invalid line is the incomplete last line of an interrupted run, which may be removed."""
        kept = line.rstrip(b"\0")  # after a power loss, bytes that were not synced may be zeros
        kept = b"".join(kept[:_HEAD_BYTES].split())  # other programs write spaces between
        if not line.endswith(b"\n") and (kept.startswith(_BEGINNING) or _BEGINNING.startswith(kept)):
            return
        raise ConfigError(f"line {number} of {self.path} is no answer of a batch: nothing is written; give another output file")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file that is not buffered, read from its beginning."""
    file.seek(0)
    rest = b""
    while chunk := file.read(_CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line + b"\n"
    if rest:
        yield rest


def _lock(file: BinaryIO, path: Path) -> None:
    """Lock a file until the process ends; ConfigError if another process has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise BlockingIOError  # removed by the run that had it
    except BlockingIOError:
        raise ConfigError(f"another run is writing {path}: wait for its end, or give another output file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be locked ({error.strerror}): give an output file on a local disk") from None
