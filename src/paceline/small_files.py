"""Files of a checkpoint that are read whole, within limits: never a pipe or a device, never more bytes than its kind has.

They are untrusted: parsing JSON raises nothing but a CheckpointError, whatever the file holds.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import CheckpointError

CONFIG_BYTES = 4 << 20
"""Of config.json and its like; real ones have some kilobytes."""
INDEX_BYTES = 32 << 20
"""Of an index of shards, and of a safetensors header: 100,000 tensors take about 12 million bytes."""
TOKENIZER_BYTES = 64 << 20
"""Of one file of a tokenizer; vocabularies of 262,144 pieces take 33 million bytes."""
MAX_VALUES = 1 << 20
"""Values of one JSON text: each takes memory of its own."""
MAX_DEPTH = 64
"""Arrays and objects inside one another."""
_INTEGER_DIGITS = 20

_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: Path) -> BinaryIO:
    """The file, open for reading; symbolic links are followed.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is no regular file, or cannot be opened.
    """
    try:
        _check_regular(path, os.stat(path))  # before opening: that may have effects on a device
        handle = os.open(path, _OPEN_FLAGS)  # does not block, should the file have been exchanged
        try:
            _check_regular(path, os.fstat(handle))
            return os.fdopen(handle, "rb")
        except BaseException:
            os.close(handle)
            raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def check_regular(path: Path) -> None:
    """Check that `open_regular` would open a file.

    Raises:
        CheckpointError: it is no regular file, or there is none.
    """
    try:
        open_regular(path).close()
    except FileNotFoundError as error:
        raise unreadable(path, error) from error


def read_small(path: Path, limit: int) -> bytes | None:
    """All bytes of a file, None where there is none.

    Raises:
        CheckpointError: it is no regular file, has more than `limit` bytes, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            size = min(os.fstat(file.fileno()).st_size, limit)
            content = file.read(size + 1)
            if len(content) > size:  # more than stat says, as in some system files
                content += file.read(limit + 1 - len(content))
    except FileNotFoundError:
        return None
    except (OSError, TypeError) as error:  # a TypeError: of something that only looks like a regular file
        raise unreadable(path, error) from error
    if len(content) > limit:
        raise _too_large(path, limit)
    return content


def check_small(path: Path, limit: int) -> None:
    """Check that `read_small` would read a file; a missing file passes.

    Raises:
        CheckpointError: it is no regular file, or has more than `limit` bytes.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    _check_regular(path, status)
    if status.st_size > limit:
        raise _too_large(path, limit)


def read_json(path: Path, limit: int = CONFIG_BYTES) -> dict[str, Any] | None:
    """The JSON object a file holds, None where there is no file.

    Raises:
        CheckpointError: as `read_small`; or it holds no JSON object.
    """
    content = read_small(path, limit)
    return None if content is None else json_object(content, path)


def json_object(content: bytes, source: object) -> dict[str, Any]:
    """The object a JSON text describes. Integers of more digits than 64 bits have become floats, as in most other readers.

    Args:
        source: what errors name.

    Raises:
        CheckpointError: it is no JSON, holds no object, or more values than MAX_VALUES or deeper ones than MAX_DEPTH.
    """
    num_nested = content.count(b"[") + content.count(b"{")
    if num_nested + content.count(b",") > MAX_VALUES:
        raise CheckpointError(f"{source} holds more than {MAX_VALUES} JSON values; download it again")
    try:
        values = json.loads(content.decode("utf-8"), parse_int=_integer)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{source} cannot be read as JSON ({type(error).__name__}: {error}); download it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{source} holds a JSON {type(values).__name__}, expected an object; download it again")
    if num_nested > MAX_DEPTH and _is_deep(values):
        raise CheckpointError(f"{source} nests JSON values more than {MAX_DEPTH} deep; download it again")
    return values


def write_whole(path: Path, content: str) -> None:
    """Write a text file; an interrupted write leaves what was there before."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(content, encoding="utf-8")
    temporary.replace(path)


def is_file(path: Path) -> bool:
    """Whether there is a regular file that can be seen; never raises."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """What to raise where the system cannot open or read a file."""
    reason = getattr(error, "strerror", None) or error
    return CheckpointError(f"{path} cannot be read: {reason}; check the path and its permissions")


def _too_large(path: Path, limit: int) -> CheckpointError:
    return CheckpointError(f"{path} has more than the {limit} bytes that a file of its kind may have; download it again")


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise CheckpointError(f"{path} is {kind}, expected a regular file; download it again")


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _INTEGER_DIGITS else float(digits)


def _is_deep(values: Any) -> bool:
    """Whether arrays and objects nest deeper than MAX_DEPTH; level by level, without recursion."""
    level = [values]
    for _ in range(MAX_DEPTH):
        items = (item for one in level for item in (one.values() if isinstance(one, dict) else one))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True
