"""The description of a pass as kernels/native.h wants it, in memory that serves pass after pass."""

from collections.abc import Sequence
from ctypes import addressof, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.runtimes.base import ForwardBatch, IntArray, RowRange, Wanted
from paceline.runtimes.native.records import Pass
from paceline.runtimes.rotary import RotaryTables

_LEAST = 64  # elements of every array


class PassMemory:
    """One `Pass` with the arrays it names; they grow and are filled anew for every pass.

    Args:
        tables: of rotary angles; None where nothing is turned.

    Attributes:
        record: what the kernels are given.
        ranges: [ranges, 6] the fields of `records.Range`.
    """

    def __init__(self, tables: RotaryTables | None) -> None:
        self.record = Pass()
        count = 0 if tables is None else len(tables.pairs)
        self._cos, self._sin = (c_void_p * count)(), (c_void_p * count)()
        self.record.cos, self.record.sin = addressof(self._cos), addressof(self._sin)
        self._angles = [_Angles(self._cos, self._sin, index, tables) for index in range(count) if tables is not None]
        self.ranges: IntArray = np.zeros((0, 6), np.int32)
        self._range_of_row: IntArray = np.zeros(0, np.int32)
        self._selected: IntArray = np.zeros(0, np.int32)
        self._block_tables: IntArray = np.zeros(0, np.int32)
        self._masks: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def describe(self, batch: ForwardBatch, wanted: Wanted) -> None:
        """Fill the record; it holds until the next call."""
        record, num_rows, num_selected, num_ranges = self.record, len(batch.positions), len(wanted.rows), len(batch.ranges)
        if num_rows > len(self._range_of_row):
            self._range_of_row = self._grown(num_rows, "range_of_row")
        if num_selected > len(self._selected):
            self._selected = self._grown(num_selected, "selected")
        if num_ranges > len(self.ranges):
            self.ranges = self._grown(6 * num_ranges, "ranges").reshape(-1, 6)
        self._make_room(batch.ranges)
        record.rows, record.selected_rows, record.num_ranges = num_rows, num_selected, num_ranges
        self._selected[:num_selected] = wanted.rows
        table = mask = 0
        for index, item in enumerate(batch.ranges):
            end = table + len(item.block_table)
            self.ranges[index] = (item.start, item.num_rows, item.cached_len, table, -1 if item.mask is None else mask, item.first_slot)
            self._range_of_row[item.start : item.start + item.num_rows] = index
            self._block_tables[table:end] = item.block_table
            table = end
            if item.mask is not None:
                self._masks[mask : mask + item.mask.size].reshape(item.mask.shape)[...] = item.mask
                mask += item.mask.size
        self._draws = wanted.draws  # alive until the pass is over
        record.draws = None if wanted.draws is None else wanted.draws.ctypes.data
        for angles in self._angles:
            angles.of(batch.positions)

    def _make_room(self, ranges: Sequence[RowRange]) -> None:
        """For block tables and masks."""
        num_blocks = num_masked = 0
        for item in ranges:
            num_blocks += len(item.block_table)
            num_masked += 0 if item.mask is None else item.mask.size
        # Empty first: an interrupt between a new address and its array must not leave room that is not there.
        if num_blocks > len(self._block_tables):
            self._block_tables = self._block_tables[:0]
            self._block_tables = self._grown(num_blocks, "block_tables")
        if num_masked > len(self._masks):
            self._masks = self._masks[:0]
            self._masks = self._grown(num_masked, "masks", np.uint8)

    def _grown(self, size: int, field: str, dtype: Any = np.int32) -> NDArray[Any]:
        """A larger array for a field of the record."""
        array = np.zeros(6 * max(_LEAST, 1 << (size - 1).bit_length()), dtype)
        setattr(self.record, field, array.ctypes.data)
        return array


class _Angles:
    """The rows of one rope's tables that a pass needs: a single one is named where it lies, more are collected.

    Args:
        cos, sin: addresses, by rope.
        index: of the rope.
        tables: of all ropes.
    """

    def __init__(self, cos: Any, sin: Any, index: int, tables: RotaryTables) -> None:
        self._cos, self._sin, self._index, self._all = cos, sin, index, tables
        self._look()
        self._collected = [table[:0] for table in self._tables]
        self._collected_addresses = [0, 0]

    def of(self, positions: IntArray) -> None:
        """Raises IndexError: a position is beyond what the tables may hold."""
        count = len(positions)
        if count == 1 and 0 <= (position := int(positions[0])) < self._end:
            offset = position * self._row_bytes
            self._cos[self._index], self._sin[self._index] = self._addresses[0] + offset, self._addresses[1] + offset
            return
        if count and (last := int(positions.max())) >= self._end:
            self._all.reach(last)
            self._look()
            self.of(positions)
            return
        if count > len(self._collected[0]):
            self._collected = [table[:0] for table in self._tables]  # as in `_make_room`
            longer = [np.empty((1 << (count - 1).bit_length(), table.shape[1]), np.float32) for table in self._tables]
            self._collected_addresses = [array.ctypes.data for array in longer]
            self._collected = longer
        for table, array in zip(self._tables, self._collected, strict=True):
            array[:count] = table[positions]
        self._cos[self._index], self._sin[self._index] = self._collected_addresses

    def _look(self) -> None:
        self._end = 0  # as in `_make_room`
        self._tables = self._all.pairs[self._index]
        self._addresses = [table.ctypes.data for table in self._tables]
        self._row_bytes = self._tables[0].strides[0]
        self._end = len(self._tables[0])
