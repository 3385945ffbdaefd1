"""Arrays that begin at a cache line: a vector of the kernels that lies across two of them takes longer to read and to write."""

import math
from ctypes import addressof, c_char
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_CACHE_LINE = 64
_PIECE_BYTES = 1 << 27  # of which only what is used takes memory: at the end of each a part of a large page is lost
_LARGE_BYTES = 1 << 22  # of an array that numpy asks large pages for itself
_BYTES = c_char * 0


def zeros(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Memory that nobody touches costs nothing."""
    return _begun(np.zeros(_num_bytes(shape, dtype), np.uint8), shape, dtype)


def empty(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Whatever is there."""
    return _begun(np.empty(_num_bytes(shape, dtype), np.uint8), shape, dtype)


def _num_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize + _CACHE_LINE


def _begun(room: NDArray[np.uint8], shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    first = -room.ctypes.data % _CACHE_LINE
    return room[first : first + _num_bytes(shape, dtype) - _CACHE_LINE].view(dtype).reshape(shape)


def address_of(array: NDArray[Any]) -> int:
    """Where an array without gaps lies that can be written to: as `ctypes.data`, in a third of the time."""
    return addressof(_BYTES.from_buffer(array))  # type: ignore[arg-type]  # numpy does not say that it has one


class Arena:
    """Room for arrays that live as long as one another, in pieces that the system maps by large pages: small ones are so many that products
    of several rows wait until the processor has looked them up."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._left: NDArray[np.uint8] = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """As the function of this name; the piece stays as long as any array in it does."""
        size = _num_bytes(shape, dtype)
        if size >= _LARGE_BYTES:
            return empty(shape, dtype)
        with self._lock:
            if size > len(self._left):
                self._left = np.empty(_PIECE_BYTES, np.uint8)
            room, self._left = self._left[:size], self._left[size:]
        return _begun(room, shape, dtype)
