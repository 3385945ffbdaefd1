"""Reads whole files of untrusted checkpoints, such as config.json, with a limit on their size. Pipes and devices are rejected.

Every error of reading or parsing is raised as a CheckpointError.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import CheckpointError, ConfigError

CONFIG_BYTES = 4 << 20
"""Limit for config.json and similar files, which usually have a few kilobytes."""
INDEX_BYTES = 32 << 20
"""Limit for the index of safetensors shards, and for a safetensors header. For 100,000 tensors they have about 12 million bytes."""
TOKENIZER_BYTES = 64 << 20
"""Limit for one file of a tokenizer. With a vocabulary of 262,144 pieces it has 33 million bytes."""
PROMPTS_BYTES = 256 << 20
"""Limit for a file of prompts."""
MAX_VALUES = 1 << 20
"""Maximum number of values in a JSON file, because each takes much more memory than its text."""
MAX_DEPTH = 64
"""Maximum nesting of arrays and objects in a JSON file."""
_INTEGER_DIGITS = 20

_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. Symbolic links are followed.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: it is not a regular file, such as a pipe or a device, or it cannot be opened.
    """
    try:
        _check_status(path, os.stat(path))  # before `os.open`, because opening a device may have side effects
        handle = os.open(path, _OPEN_FLAGS)  # does not block, even if a pipe has replaced the file since the check
        try:
            _check_status(path, os.fstat(handle))
            return os.fdopen(handle, "rb")
        except BaseException:
            os.close(handle)
            raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
    except (OSError, ValueError) as error:
        raise unreadable_error(path, error) from error


def check_regular_file(path: Path) -> None:
    """Check that a path is a regular file that can be opened.

    Raises:
        CheckpointError: it is not, or it does not exist.
    """
    try:
        open_regular_file(path).close()
    except FileNotFoundError as error:
        raise unreadable_error(path, error) from error


def read_small(path: Path, limit: int) -> bytes | None:
    """Return all bytes of a file; None = it does not exist.

    Raises:
        CheckpointError: it is not a regular file, has more than `limit` bytes, or cannot be read.
    """
    try:
        with open_regular_file(path) as file:
            size = min(os.fstat(file.fileno()).st_size, limit)
            content = file.read(size + 1)
            if len(content) > size:  # `st_size` is too small, as for files in /proc
                content += file.read(limit + 1 - len(content))
    except FileNotFoundError:
        return None
    except (OSError, TypeError) as error:  # `read` of a non-blocking file may return None, hence TypeError
        raise unreadable_error(path, error) from error
    if len(content) > limit:
        raise _too_large_error(path, limit)
    return content


def prompt_lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines of a user's file of prompts that are not blank, with their numbers from 1.

    Raises:
        ConfigError: there is no such file, or it cannot be read as UTF-8.
    """
    try:
        content = read_small(path, PROMPTS_BYTES)
        text = None if content is None else content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text at byte {error.start}: convert it first") from None
    except CheckpointError as error:
        what = str(error).removesuffix("; download it again")
        raise ConfigError(f"the prompts cannot be read: {what}") from error
    if text is None:
        raise ConfigError(f"there is no file {path}: give a file of prompts, a text or a JSON object a line")
    return [(number, line.strip("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def check_small(path: Path, limit: int) -> None:
    """Check that `read_small` would accept a file. A file that does not exist passes.

    Raises:
        CheckpointError: it is not a regular file, or has more than `limit` bytes.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        raise unreadable_error(path, error) from error
    _check_status(path, status)
    if status.st_size > limit:
        raise _too_large_error(path, limit)


def read_json(path: Path, limit: int = CONFIG_BYTES) -> dict[str, Any] | None:
    """Return the JSON object in a file; None = the file does not exist.

    Raises:
        CheckpointError: as for `read_small` and `json_object`.
    """
    content = read_small(path, limit)
    return None if content is None else json_object(content, path)


def json_object(content: bytes, source: object) -> dict[str, Any]:
    """Parse a JSON object. Integers of more than 20 digits, which do not fit in 64 bits, become floats.

    Args:
        source: the file, for error texts.

    Raises:
        CheckpointError: the content is not a JSON object, has more than MAX_VALUES values, or is nested deeper than MAX_DEPTH.
    """
    num_nested = content.count(b"[") + content.count(b"{")
    if num_nested + content.count(b",") > MAX_VALUES:
        raise CheckpointError(f"{source} holds more than {MAX_VALUES} JSON values; download it again")
    try:
        values = json.loads(content.decode("utf-8"), parse_int=_parse_integer)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{source} cannot be read as JSON ({type(error).__name__}: {error}); download it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{source} holds a JSON {type(values).__name__}, expected an object; download it again")
    if num_nested > MAX_DEPTH and _is_too_deep(values):
        raise CheckpointError(f"{source} nests JSON values more than {MAX_DEPTH} deep; download it again")
    return values


def write_atomically(path: Path, content: str) -> None:
    """Write a text file. If this is interrupted or fails, the file keeps its previous content."""
    with replaced_file(path) as unfinished:
        unfinished.write_text(content, encoding="utf-8")


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Context manager: yield a file to write, which then replaces `path`. If writing is interrupted or fails, `path` is unchanged."""
    unfinished = path.with_name(f"{path.name}.new")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()  # a part of a file, on a disk that may be full
        raise


def is_file(path: Path) -> bool:
    """Return whether a path is an existing regular file. Never raises."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def unreadable_error(path: Path, error: Exception) -> CheckpointError:
    """Return the error to raise if the operating system cannot open or read a file."""
    reason = getattr(error, "strerror", None) or error
    return CheckpointError(f"{path} cannot be read: {reason}; check the path and its permissions")


def _too_large_error(path: Path, limit: int) -> CheckpointError:
    return CheckpointError(f"{path} has more than the {limit} bytes that a file of its kind may have; download it again")


def _check_status(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise CheckpointError(f"{path} is {kind}, expected a regular file; download it again")


def _parse_integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _INTEGER_DIGITS else float(digits)


def _is_too_deep(values: Any) -> bool:
    """Return whether arrays and objects are nested deeper than MAX_DEPTH. Works without recursion, which could overflow."""
    level = [values]
    for _ in range(MAX_DEPTH):
        items = (item for one in level for item in (one.values() if isinstance(one, dict) else one))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True
