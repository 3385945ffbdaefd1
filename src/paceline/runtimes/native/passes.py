"""Fill the `Pass` record of kernels/native.h from a batch. Later passes use the same record and arrays."""

from collections.abc import Sequence
from ctypes import addressof, c_void_p
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache.recurrent_state import RecurrentStateCache
from paceline.kv_cache.sliding_window import SlidingWindowCache
from paceline.runtimes.base import ForwardBatch, IntArray, LogitsRows
from paceline.runtimes.native.records import Pass
from paceline.runtimes.native.rotary import PassAngles, RotaryTables
from paceline.runtimes.native.states import PassStateRecords

_MIN_ARRAY_LEN = 64
_RANGE_FORMAT = Struct("=6i")  # struct format of `records.Range`


class PassRecord:
    """A `Pass` record and the arrays to which it points, which are enlarged as needed.

    Args:
        tables: tables of rotary angles; None = the network has no rotary embedding.

    Attributes:
        record: the `Pass` struct that is passed to the kernels.
        ranges: [ranges, 6] the fields of each `records.Range`.
        range_of_row, logits_rows, block_tables, masks: arrays of the record, see kernels/native.h.
        windows: caches of sliding-window layers. In `block_tables`, tables of full attention are followed by those of each window cache.
        recurrent: states of recurrent layers; None = the network has none.
        states: records of how a pass updates the recurrent states.
    """

    def __init__(self, tables: RotaryTables | None) -> None:
        self.record = Pass()
        count = 0 if tables is None else len(tables.cos_sin)
        self._cos, self._sin = (c_void_p * count)(), (c_void_p * count)()
        self.record.cos, self.record.sin = addressof(self._cos), addressof(self._sin)
        self._angles = [PassAngles(self._cos, self._sin, index, tables) for index in range(count) if tables is not None]
        self.ranges: IntArray = np.zeros((0, 6), np.int32)
        self.range_of_row: IntArray = np.zeros(0, np.int32)
        self.logits_rows: IntArray = np.zeros(0, np.int32)
        self.block_tables: IntArray = np.zeros(0, np.int32)
        self.masks: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.windows: Sequence[SlidingWindowCache] = ()
        self.recurrent: RecurrentStateCache | None = None
        self.states = PassStateRecords()

    def fill(self, batch: ForwardBatch, logits_rows: LogitsRows) -> None:
        """Fill the record for one pass."""
        record, num_rows, num_logits_rows, num_ranges = self.record, len(batch.positions), len(logits_rows.rows), len(batch.ranges)
        num_blocks = num_masked = 0
        for item in batch.ranges:
            num_blocks += len(item.block_table)
            num_masked += 0 if item.mask is None else item.mask.size
        self._reserve("range_of_row", num_rows)
        self._reserve("logits_rows", num_logits_rows)
        self._reserve("ranges", num_ranges)
        self._reserve("block_tables", num_blocks * (1 + len(self.windows)))
        self._reserve("masks", num_masked)
        record.rows, record.num_logits_rows, record.num_ranges = num_rows, num_logits_rows, num_ranges
        self.logits_rows[:num_logits_rows] = logits_rows.rows
        table_offset = mask_offset = 0
        ranges, range_of_row, block_tables = self.ranges.data, self.range_of_row, self.block_tables
        for index, item in enumerate(batch.ranges):
            table_end = table_offset + len(item.block_table)
            _RANGE_FORMAT.pack_into(
                ranges, index * _RANGE_FORMAT.size,
                item.start, item.num_rows, item.cached_len, table_offset, -1 if item.mask is None else mask_offset, item.first_visible_slot,
            )  # fmt: skip
            range_of_row[item.start : item.start + item.num_rows] = index
            block_tables[table_offset:table_end] = item.block_table
            table_offset = table_end
            if item.mask is not None:
                self.masks[mask_offset : mask_offset + item.mask.size].reshape(item.mask.shape)[...] = item.mask
                mask_offset += item.mask.size
        record.blocks_per_table_set = num_blocks if self.windows else 0
        for number, window in enumerate(self.windows, 1):
            self._write_window_tables(window, batch, number * num_blocks)
        self._sampling = logits_rows.sampling  # kept: the record points to this array until the pass ends
        record.sampling = None if logits_rows.sampling is None else logits_rows.sampling.ctypes.data
        for angles in self._angles:
            angles.set_positions(batch.positions)
        if self.recurrent is not None:
            record.states = self.states.make_records(self.recurrent, batch)

    def _write_window_tables(self, window: SlidingWindowCache, batch: ForwardBatch, begin: int) -> None:
        """Write the block table of each range in a sliding-window cache to `block_tables`, from index `begin` on."""
        for item in batch.ranges:
            table = window.block_table(item.sequence_id)
            self.block_tables[begin : begin + len(table)] = table
            begin += len(item.block_table)

    def _reserve(self, field: str, size: int) -> None:
        """Replace an array of the record by a longer one if it has fewer than `size` elements."""
        array: NDArray[Any] = getattr(self, field)
        if size > len(array):
            setattr(self, field, array[:0])  # after an interrupt (Ctrl-C) here, the next pass replaces it again
            longer = np.zeros((max(_MIN_ARRAY_LEN, 1 << (size - 1).bit_length()), *array.shape[1:]), array.dtype)
            setattr(self.record, field, longer.ctypes.data)
            setattr(self, field, longer)
