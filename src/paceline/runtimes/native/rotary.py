"""Tables of rotary angles, and which rows of them a pass reads."""

from typing import Any

import numpy as np

from paceline.models.config import ModelConfig
from paceline.models.rope import inverse_frequencies, query_scales
from paceline.runtimes.base import FloatArray, IntArray

MIN_POSITIONS = 256
"""Number of positions for which angles are computed at load."""


class RotaryTables:
    """Tables of cos and sin, times the attention factor and temperature, for each of `config.rope_variants`.

    The tables are extended when a pass needs larger positions, because a model may allow millions. Extension does not change existing rows.

    Args:
        max_position: the largest position. If less than MIN_POSITIONS, that many are allowed, as the tests at load need them.

    Attributes:
        cos_sin: for each variant cos and sin, each [positions, R / 2] float32, contiguous. A new list whenever the tables are extended.
    """

    def __init__(self, config: ModelConfig, max_position: int) -> None:
        self._max_position = max(max_position, MIN_POSITIONS)
        self._ropes = [(rope, *inverse_frequencies(rope, head_size)) for rope, head_size in config.rope_variants]
        self.cos_sin = self._compute_tables(0, min(MIN_POSITIONS, self._max_position) + 1)

    def extend_to(self, position: int) -> None:
        """Extend the tables to include `position`.

        Raises:
            IndexError: the position is larger than `max_position`, or negative.
        """
        begin = len(self.cos_sin[0][0])
        if 0 <= position < begin:
            return
        if not 0 <= position <= self._max_position:
            raise IndexError(f"position {position} is not in the range 0 to {self._max_position}")
        added = self._compute_tables(begin, min(1 << position.bit_length(), self._max_position + 1))
        self.cos_sin = [
            (np.concatenate([cos, more_cos]), np.concatenate([sin, more_sin]))
            for (cos, sin), (more_cos, more_sin) in zip(self.cos_sin, added, strict=True)
        ]

    def _compute_tables(self, begin: int, end: int) -> list[tuple[FloatArray, FloatArray]]:
        positions = np.arange(begin, end, dtype=np.int64)
        tables = []
        for rope, frequencies, factor in self._ropes:
            angles = positions.astype(np.float32)[:, None] * frequencies[None, :]
            scales = np.float32(factor) * query_scales(rope, positions)[:, None]
            tables.append((np.cos(angles) * scales, np.sin(angles) * scales))
        return tables


class PassAngles:
    """Writes the addresses of the rotary angles of a pass's rows, for one of `config.rope_variants`.

    If positions are consecutive, the addresses are in the tables; otherwise rows of the tables are copied to another array.

    Args:
        cos, sin: ctypes arrays of addresses; `set_positions` writes element `index`.
        index: index of the variant.
        tables: tables of all variants.
    """

    def __init__(self, cos: Any, sin: Any, index: int, tables: RotaryTables) -> None:
        self._cos, self._sin, self._index, self._rotary_tables = cos, sin, index, tables
        self._read_tables()
        self._copied_rows = [table[:0] for table in self._tables]
        self._copied_addresses = [0, 0]

    def set_positions(self, positions: IntArray) -> None:
        """Set the addresses for rows with these positions.

        Raises:
            IndexError: a position is larger than `max_position` of the tables.
        """
        count, values = len(positions), positions.tolist()
        if count and (last := max(values)) >= self._num_positions:
            self._rotary_tables.extend_to(last)
            self._read_tables()
            self.set_positions(positions)
            return
        if count and values[0] >= 0 and values == list(range(values[0], values[0] + count)):
            offset = values[0] * self._row_bytes
            self._cos[self._index], self._sin[self._index] = self._addresses[0] + offset, self._addresses[1] + offset
            return
        if count > len(self._copied_rows[0]):
            self._copied_rows = [table[:0] for table in self._tables]  # after an interrupt (Ctrl-C), the next pass allocates again
            longer = [np.empty((1 << (count - 1).bit_length(), table.shape[1]), np.float32) for table in self._tables]
            self._copied_addresses = [array.ctypes.data for array in longer]
            self._copied_rows = longer
        for table, array in zip(self._tables, self._copied_rows, strict=True):
            array[:count] = table[positions]
        self._cos[self._index], self._sin[self._index] = self._copied_addresses

    def _read_tables(self) -> None:
        self._num_positions = 0  # if this is interrupted (Ctrl-C), the next pass reads the tables again
        self._tables = self._rotary_tables.cos_sin[self._index]
        self._addresses = [table.ctypes.data for table in self._tables]
        self._row_bytes = self._tables[0].strides[0]
        self._num_positions = len(self._tables[0])
