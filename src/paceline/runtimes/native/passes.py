"""The description of a pass as kernels/native.h wants it, in memory that serves pass after pass."""

from collections.abc import Sequence
from ctypes import addressof, c_void_p
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache.recurrent_state import RecurrentStateCache
from paceline.kv_cache.sliding_window import SlidingWindowCache
from paceline.runtimes.base import ForwardBatch, IntArray, Wanted
from paceline.runtimes.native.records import Pass
from paceline.runtimes.native.states import PassStates
from paceline.runtimes.rotary import RotaryTables

_LEAST = 64  # elements of every array
_RANGE = Struct("=6i")  # the fields of `records.Range`


class PassMemory:
    """One `Pass` with the arrays that its fields name; they grow and are filled anew for every pass.

    Args:
        tables: of rotary angles; None where nothing is turned.

    Attributes:
        record: what the kernels are given.
        ranges: [ranges, 6] the fields of `records.Range`.
        range_of_row, selected, block_tables, masks: as in `records.Pass`.
        windows: layer caches whose blocks are others than the cache's, in the order of the tables that operations name from 1 on.
        state_cache: of recurrent layers; None = the network has none.
        states: what passes do to it.
    """

    def __init__(self, tables: RotaryTables | None) -> None:
        self.record = Pass()
        count = 0 if tables is None else len(tables.pairs)
        self._cos, self._sin = (c_void_p * count)(), (c_void_p * count)()
        self.record.cos, self.record.sin = addressof(self._cos), addressof(self._sin)
        self._angles = [_Angles(self._cos, self._sin, index, tables) for index in range(count) if tables is not None]
        self.ranges: IntArray = np.zeros((0, 6), np.int32)
        self.range_of_row: IntArray = np.zeros(0, np.int32)
        self.selected: IntArray = np.zeros(0, np.int32)
        self.block_tables: IntArray = np.zeros(0, np.int32)
        self.masks: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.windows: Sequence[SlidingWindowCache] = ()
        self.state_cache: RecurrentStateCache | None = None
        self.states = PassStates()
        self._kept: list[NDArray[Any]] = []

    def describe(self, batch: ForwardBatch, wanted: Wanted) -> None:
        """Fill the record; it holds until the next call."""
        record, num_rows, num_selected, num_ranges = self.record, len(batch.positions), len(wanted.rows), len(batch.ranges)
        num_blocks = num_masked = 0
        for item in batch.ranges:
            num_blocks += len(item.block_table)
            num_masked += 0 if item.mask is None else item.mask.size
        if num_rows > len(self.range_of_row):
            self._grow("range_of_row", num_rows)
        if num_selected > len(self.selected):
            self._grow("selected", num_selected)
        if num_ranges > len(self.ranges):
            self._grow("ranges", num_ranges)
        if num_blocks * (1 + len(self.windows)) > len(self.block_tables):
            self._grow("block_tables", num_blocks * (1 + len(self.windows)))
        if num_masked > len(self.masks):
            self._grow("masks", num_masked)
        record.rows, record.selected_rows, record.num_ranges = num_rows, num_selected, num_ranges
        self.selected[:num_selected] = wanted.rows
        table = mask = 0
        ranges, range_of_row, block_tables = self.ranges.data, self.range_of_row, self.block_tables
        for index, item in enumerate(batch.ranges):
            end = table + len(item.block_table)
            _RANGE.pack_into(
                ranges, index * _RANGE.size,
                item.start, item.num_rows, item.cached_len, table, -1 if item.mask is None else mask, item.first_slot,
            )  # fmt: skip
            range_of_row[item.start : item.start + item.num_rows] = index
            block_tables[table:end] = item.block_table
            table = end
            if item.mask is not None:
                self.masks[mask : mask + item.mask.size].reshape(item.mask.shape)[...] = item.mask
                mask += item.mask.size
        record.blocks_of_tables = num_blocks if self.windows else 0
        for number, window in enumerate(self.windows, 1):
            self._describe_window(window, batch, number * num_blocks)
        self._draws = wanted.draws  # alive until the pass is over
        record.draws = None if wanted.draws is None else wanted.draws.ctypes.data
        for angles in self._angles:
            angles.of(batch.positions)
        if self.state_cache is not None:
            record.states = self.states.describe(self.state_cache, batch)

    def _describe_window(self, window: SlidingWindowCache, batch: ForwardBatch, begin: int) -> None:
        """Write the block tables of a sliding window, range by range, from `begin` on."""
        for item in batch.ranges:
            table = window.table(item.sequence_id)
            self.block_tables[begin : begin + len(table)] = table
            begin += len(item.block_table)

    def _grow(self, field: str, size: int) -> None:
        """Make one of the arrays longer."""
        array = getattr(self, field)
        setattr(self, field, array[:0])  # an interrupt between a new address and its array leaves none: made anew next time
        longer = np.zeros((max(_LEAST, 1 << (size - 1).bit_length()), *array.shape[1:]), array.dtype)
        self._kept.append(longer)  # for good: where two threads come here, which is forbidden, the record may name the other's
        setattr(self.record, field, longer.ctypes.data)
        setattr(self, field, longer)


class _Angles:
    """The rows of one rope's tables that a pass needs: those of a run of positions are named where they lie, others are collected.

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
        count, numbers = len(positions), positions.tolist()
        if count and (last := max(numbers)) >= self._end:
            self._all.reach(last)
            self._look()
            self.of(positions)
            return
        if count and numbers[0] >= 0 and numbers == list(range(numbers[0], numbers[0] + count)):
            offset = numbers[0] * self._row_bytes
            self._cos[self._index], self._sin[self._index] = self._addresses[0] + offset, self._addresses[1] + offset
            return
        if count > len(self._collected[0]):
            self._collected = [table[:0] for table in self._tables]  # as in `_grow`
            longer = [np.empty((1 << (count - 1).bit_length(), table.shape[1]), np.float32) for table in self._tables]
            self._collected_addresses = [array.ctypes.data for array in longer]
            self._collected = longer
        for table, array in zip(self._tables, self._collected, strict=True):
            array[:count] = table[positions]
        self._cos[self._index], self._sin[self._index] = self._collected_addresses

    def _look(self) -> None:
        self._end = 0  # as in `_grow`
        self._tables = self._all.pairs[self._index]
        self._addresses = [table.ctypes.data for table in self._tables]
        self._row_bytes = self._tables[0].strides[0]
        self._end = len(self._tables[0])
