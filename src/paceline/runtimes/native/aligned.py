"""Arrays that begin where a vector of the kernels does in memory: one that lies across two cache lines takes longer."""

import math

import numpy as np
from numpy.typing import NDArray

from paceline.runtimes.base import FloatArray
from paceline.runtimes.native.library import LANES

LINE = 4 * LANES
"""Bytes of a cache line, and of a vector."""


def zeros(shape: tuple[int, ...]) -> FloatArray:
    """Float32."""
    return zero_bytes((4 * math.prod(shape),)).view(np.float32).reshape(shape)


def zero_bytes(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return _from_line(np.zeros(math.prod(shape) + LINE, np.uint8), shape)


def empty(shape: tuple[int, ...]) -> FloatArray:
    """Float32, whatever lies there."""
    num_bytes = 4 * math.prod(shape)
    return _from_line(np.empty(num_bytes + LINE, np.uint8), (num_bytes,)).view(np.float32).reshape(shape)


def _from_line(room: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    first = -room.ctypes.data % LINE
    return room[first : first + math.prod(shape)].reshape(shape)
