"""Tables of rotary angles, computed up to the longest position seen, and the rows of them that a pass reads."""

from typing import Any

import numpy as np

from paceline.models.config import ModelConfig
from paceline.models.rope import inverse_frequencies, query_scales
from paceline.runtimes.base import FloatArray, IntArray

MIN_POSITIONS = 256


class RotaryTables:
    """cos and sin for positions from 0 on, times the attention factor and the temperature, for each of `config.rotations`.

    Tables grow by doubling, not to the length a model allows at once. Rows added later have the bits they would have had at first.

    Args:
        limit: the last position there can be; at least MIN_POSITIONS, because load-time tests run rows of their own.

    Attributes:
        cos_sin: for each rotation cos and sin, [positions, R / 2] float32, contiguous; a new list whenever the tables grow.
    """

    def __init__(self, config: ModelConfig, limit: int) -> None:
        self._limit = max(limit, MIN_POSITIONS)
        self._ropes = [(rope, *inverse_frequencies(rope, head_size)) for rope, head_size in config.rope_variants]
        self.cos_sin = self._compute(0, min(MIN_POSITIONS, self._limit) + 1)

    def extend_to(self, position: int) -> None:
        """Grow the tables to hold `position`.

        Raises:
            IndexError: it is beyond the limit, or negative.
        """
        begin = len(self.cos_sin[0][0])
        if 0 <= position < begin:
            return
        if not 0 <= position <= self._limit:
            raise IndexError(f"position {position} is beyond {self._limit}, the last one that was prepared for")
        added = self._compute(begin, min(1 << position.bit_length(), self._limit + 1))
        self.cos_sin = [
            (np.concatenate([cos, more_cos]), np.concatenate([sin, more_sin]))
            for (cos, sin), (more_cos, more_sin) in zip(self.cos_sin, added, strict=True)
        ]

    def _compute(self, begin: int, end: int) -> list[tuple[FloatArray, FloatArray]]:
        positions = np.arange(begin, end, dtype=np.int64)
        tables = []
        for rope, frequencies, factor in self._ropes:
            angles = positions.astype(np.float32)[:, None] * frequencies[None, :]
            scales = np.float32(factor) * query_scales(rope, positions)[:, None]
            tables.append((np.cos(angles) * scales, np.sin(angles) * scales))
        return tables


class PassAngles:
    """Addresses of the table rows of a pass, for one rotation. Consecutive positions are read in place, others are gathered.

    Args:
        cos, sin: ctypes arrays of addresses, by rotation; `set_positions` writes entry `index`.
        index: index of the rotation.
        tables: tables of all rotations.
    """

    def __init__(self, cos: Any, sin: Any, index: int, tables: RotaryTables) -> None:
        self._cos, self._sin, self._index, self._all = cos, sin, index, tables
        self._read_tables()
        self._gathered = [table[:0] for table in self._tables]
        self._gathered_addresses = [0, 0]

    def set_positions(self, positions: IntArray) -> None:
        """Point to the rows of `positions`.

        Raises:
            IndexError: a position is beyond the tables' limit.
        """
        count, numbers = len(positions), positions.tolist()
        if count and (last := max(numbers)) >= self._end:
            self._all.extend_to(last)
            self._read_tables()
            self.set_positions(positions)
            return
        if count and numbers[0] >= 0 and numbers == list(range(numbers[0], numbers[0] + count)):
            offset = numbers[0] * self._row_bytes
            self._cos[self._index], self._sin[self._index] = self._addresses[0] + offset, self._addresses[1] + offset
            return
        if count > len(self._gathered[0]):
            self._gathered = [table[:0] for table in self._tables]  # if an interrupt follows, no stale address remains
            longer = [np.empty((1 << (count - 1).bit_length(), table.shape[1]), np.float32) for table in self._tables]
            self._gathered_addresses = [array.ctypes.data for array in longer]
            self._gathered = longer
        for table, array in zip(self._tables, self._gathered, strict=True):
            array[:count] = table[positions]
        self._cos[self._index], self._sin[self._index] = self._gathered_addresses

    def _read_tables(self) -> None:
        self._end = 0  # if an interrupt follows, no stale address remains
        self._tables = self._all.cos_sin[self._index]
        self._addresses = [table.ctypes.data for table in self._tables]
        self._row_bytes = self._tables[0].strides[0]
        self._end = len(self._tables[0])
