"""Arrays aligned to cache lines. The kernels' 64-byte vectors are slower where they straddle two lines."""

import math
from ctypes import addressof, c_char
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_CACHE_LINE = 64
_PIECE_BYTES = 1 << 27  # size of one piece of memory; untouched pages take none
_LARGE_BYTES = 1 << 22  # numpy itself requests huge pages for larger arrays
_BYTES = c_char * 0


def zeros(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Return an aligned array of zeros. Untouched pages take no memory."""
    return _align(np.zeros(_num_bytes(shape, dtype), np.uint8), shape, dtype)


def empty(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Return an aligned array of arbitrary content."""
    return _align(np.empty(_num_bytes(shape, dtype), np.uint8), shape, dtype)


def _num_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize + _CACHE_LINE


def _align(memory: NDArray[np.uint8], shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    first = -memory.ctypes.data % _CACHE_LINE
    return memory[first : first + _num_bytes(shape, dtype) - _CACHE_LINE].view(dtype).reshape(shape)


def address_of(array: NDArray[Any]) -> int:
    """Return the address of a contiguous writable array: `ctypes.data` in a third of the time."""
    return addressof(_BYTES.from_buffer(array))  # type: ignore[arg-type]  # numpy does not declare its buffer


class Arena:
    """Allocate arrays of one lifetime in large pieces, which the system maps with huge pages.

    With small pages, products of several rows wait for TLB misses.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._left: NDArray[np.uint8] = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return an aligned array. The piece of memory is freed together with the last array in it."""
        size = _num_bytes(shape, dtype)
        if size >= _LARGE_BYTES:
            return empty(shape, dtype)
        with self._lock:
            if size > len(self._left):
                self._left = np.empty(_PIECE_BYTES, np.uint8)
            memory, self._left = self._left[:size], self._left[size:]
        return _align(memory, shape, dtype)
