"""Arrays that begin at a cache line. 64-byte vector loads that cross a cache line are slower."""

import math
from ctypes import addressof, c_char
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_CACHE_LINE_BYTES = 64
_ARENA_BYTES = 1 << 27  # size of an allocation of an `Arena`; its pages take memory only once they are written
_NUMPY_HUGE_PAGE_BYTES = 1 << 22  # for arrays of at least this size, numpy requests huge pages
_NO_BYTES = c_char * 0  # type that is placed over an array to get its address


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Return an aligned array of zeros. Pages that are never written take no memory."""
    return _align(np.zeros(_num_bytes(shape, dtype), np.uint8), shape, dtype)


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Return an aligned array with arbitrary values."""
    return _align(np.empty(_num_bytes(shape, dtype), np.uint8), shape, dtype)


def _num_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize + _CACHE_LINE_BYTES


def _align(memory: NDArray[np.uint8], shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    begin = -memory.ctypes.data % _CACHE_LINE_BYTES
    return memory[begin : begin + _num_bytes(shape, dtype) - _CACHE_LINE_BYTES].view(dtype).reshape(shape)


def address_of(array: NDArray[Any]) -> int:
    """Return the address of a contiguous writable array. Takes a third of the time of `array.ctypes.data`."""
    return addressof(_NO_BYTES.from_buffer(array))  # type: ignore[arg-type]  # numpy does not declare its buffer


class Arena:
    """Allocates arrays as slices of large arrays in huge pages. TLB misses slow down matrix products of several rows on small pages."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: NDArray[np.uint8] = np.empty(0, np.uint8)

    def allocate(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return an aligned array with arbitrary values. The large array is freed when no array in it is used any more."""
        size = _num_bytes(shape, dtype)
        if size >= _NUMPY_HUGE_PAGE_BYTES:
            return aligned_empty(shape, dtype)
        with self._lock:
            if size > len(self._free):
                self._free = np.empty(_ARENA_BYTES, np.uint8)
            memory, self._free = self._free[:size], self._free[size:]
        return _align(memory, shape, dtype)
