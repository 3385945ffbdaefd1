"""Memory-mapped files, and a check that no file was truncated after mapping: reading past a file's end would kill the process."""

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.small_files import open_regular_file, unreadable_error

_FAULT_AROUND_BYTES = 1 << 16  # Linux maps this many bytes around a faulting address at once


class MappedFiles:
    """The mapped files that the given arrays view.

    Reading a mapped page beyond the end of its file raises SIGBUS. Callers run `check_not_truncated`, which takes under a microsecond
    for each file, before each forward pass. Truncation during a pass and disk failures are not detected.
    """

    __slots__ = ("_files",)

    def __init__(self, arrays: Iterable[NDArray[Any]]) -> None:
        found = {id(mapping): (mapping, path) for mapping, path in filter(None, map(_mapping_of, arrays))}
        self._files = [(mapping, len(mapping), path) for mapping, path in found.values()]

    def __len__(self) -> int:
        return len(self._files)

    def check_not_truncated(self) -> None:
        """Check that no file is shorter than when it was mapped.

        Raises:
            CheckpointError: A file is shorter.
        """
        for mapping, num_bytes, path in self._files:
            if mapping.size() < num_bytes:
                raise CheckpointError(
                    f"{path} has {mapping.size()} bytes and had {num_bytes} when it was opened: it was truncated while in use; "
                    "restore the file and load the model again"
                )


def map_file(path: Path) -> NDArray[np.uint8]:
    """Map the bytes of a file, read-only.

    Raises:
        FileNotFoundError: The file does not exist.
        CheckpointError: The file is not a regular file, or cannot be mapped.
    """
    with open_regular_file(path) as file:
        try:
            if os.fstat(file.fileno()).st_size == 0:  # an empty file cannot be mapped
                return np.empty(0, np.uint8)
            mapped: Any = np.memmap(file, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise unreadable_error(path, error) from error
    mapped.filename = str(path)  # for the errors of `MappedFiles`
    return np.asarray(mapped)


def drop_pages(arrays: Iterable[NDArray[Any]]) -> None:
    """Release the mapped pages that arrays view. Later reads load the pages again. Arrays that view no file are ignored.

    The operating system keeps released pages in its page cache until it needs the memory.
    """
    for array in arrays:
        found = _mapping_of(array)
        if found is None or array.size == 0 or not hasattr(found[0], "madvise"):
            continue
        begin = array.ctypes.data - np.frombuffer(found[0], np.uint8).ctypes.data
        end = begin + array.itemsize + sum((count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True))
        start = max(0, begin - _FAULT_AROUND_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
        found[0].madvise(mmap.MADV_DONTNEED, start, min(len(found[0]), end + _FAULT_AROUND_BYTES) - start)


def _mapping_of(array: NDArray[Any]) -> tuple[mmap.mmap, Path] | None:
    """Return the mapped file that an array views, directly or through other arrays; None if the array has its own memory."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        base: Any = owner.base
        if isinstance(base, mmap.mmap):
            return base, Path(str(getattr(owner, "filename", "a mapped file")))
        owner = base
    return None
