"""A recorded network with the memory it runs in."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache.paged import BLOCK_SIZE
from paceline.models.config import ModelConfig
from paceline.runtimes.base import FloatArray, ForwardBatch, IntArray
from paceline.runtimes.native.library import Operation, Pass, Program, kernels
from paceline.runtimes.native.program import Recorded

_LANES = 16
_MIN_ROWS = 32


class Execution:
    """Runs passes; the results lie in `rows(...)` until the next one.

    Args:
        num_threads: threads that share the work of a pass.
        max_slots: rows a sequence and its draft tree may have together.
    """

    def __init__(self, config: ModelConfig, recorded: Recorded, *, num_threads: int, max_slots: int) -> None:
        self._recorded = recorded
        self._operations = (Operation * len(recorded.operations))(*recorded.operations)
        self._tickets = np.zeros(2 * len(recorded.operations), np.int32)
        group = config.num_heads // config.num_kv_heads
        self._scratch = [np.empty((1 + group) * (max_slots + _LANES), np.float32) for _ in range(num_threads)]
        self._scratch_addresses = np.array([part.ctypes.data for part in self._scratch], np.uint64)
        self._rotary_half = config.rope.rotary_size(config.head_size) // 2
        self._kernels = kernels()
        self._capacity = 0
        self._buffers: list[FloatArray] = []
        self._program = Program(
            operations=self._operations, num_operations=len(recorded.operations), num_threads=num_threads,
            scratch=self._scratch_addresses.ctypes.data, block_size=BLOCK_SIZE, heads=config.num_heads, kv_heads=config.num_kv_heads,
            head_size=config.head_size, rotary_half=self._rotary_half, max_context=max_slots, most_columns=recorded.most_columns,
            tickets=self._tickets.ctypes.data,
        )  # fmt: skip
        self._packed_rows = np.empty(num_threads * self._packed_floats(1), np.float32)
        self._program.packed_rows = self._packed_rows.ctypes.data
        self._make_room(_MIN_ROWS)

    def use_cache(self, storage: FloatArray) -> None:
        """Read and write keys and values in `storage` [2 * L, num_blocks, K, BLOCK_SIZE, D] from now on."""
        self._storage = storage
        self._program.cache = storage.ctypes.data
        self._program.num_blocks = storage.shape[1]

    def input_rows(self, num_rows: int, buffer: int = 0) -> FloatArray:
        """Where an input of a pass of `num_rows` rows is to be written, [num_rows, width]."""
        self._make_room(num_rows)
        return self.rows(buffer, num_rows)

    def rows(self, buffer: int, num_rows: int) -> FloatArray:
        """The first rows of a buffer, [num_rows, width]."""
        width = self._recorded.widths[buffer]
        return self._buffers[buffer][: num_rows * width].reshape(num_rows, width)

    def run(self, batch: ForwardBatch, rotations: list[tuple[FloatArray, FloatArray]]) -> None:
        """One pass over rows whose first value has been written.

        Args:
            rotations: cos and sin [T, R / 2] of the rows, for each of the config's ropes.
        """
        ranges, range_of_row, tables, masks = describe_ranges(batch)
        selected = np.ascontiguousarray(batch.logits_rows, np.int32)
        cos, sin = ((ctypes.c_void_p * 2)(*(pair[side].ctypes.data for pair in rotations)) for side in (0, 1))
        one_pass = Pass(
            len(range_of_row), len(selected), len(ranges), ranges.ctypes.data, range_of_row.ctypes.data, tables.ctypes.data,
            masks.ctypes.data, selected.ctypes.data, cos, sin,
        )  # fmt: skip
        self._kernels.paceline_run(self._program, one_pass)

    def _packed_floats(self, num_rows: int) -> int:
        """Memory for the rows of the widest product as its kernel takes them."""
        return int(self._kernels.paceline_packed_floats(num_rows, self._recorded.most_columns))

    def _make_room(self, num_rows: int) -> None:
        """Buffers for at least so many rows; memory that no pass has touched costs nothing."""
        if num_rows <= self._capacity:
            return
        self._capacity = max(_MIN_ROWS, 1 << (num_rows - 1).bit_length())
        self._buffers = [np.empty(self._capacity * width, np.float32) for width in self._recorded.widths]
        self._addresses = np.array([buffer.ctypes.data for buffer in self._buffers], np.uint64)
        self._packed = np.empty(self._packed_floats(self._capacity), np.float32)
        self._program.buffers = self._addresses.ctypes.data
        self._program.packed = self._packed.ctypes.data


def describe_ranges(batch: ForwardBatch) -> tuple[IntArray, IntArray, IntArray, NDArray[Any]]:
    """The ranges of a batch as kernels/native.h wants them.

    Returns:
        [num_ranges, 6] start, rows, cached length, offset of the block table, offset of the mask or -1, first slot seen;
        [T] range of each row; all block tables one after the other; all masks.
    """
    ranges = np.empty((len(batch.ranges), 6), np.int32)
    range_of_row = np.empty(len(batch.token_ids), np.int32)
    masks: list[NDArray[np.uint8]] = []
    table = mask = 0
    for index, item in enumerate(batch.ranges):
        ranges[index] = (item.start, item.num_rows, item.cached_len, table, -1 if item.mask is None else mask, item.first_slot)
        range_of_row[item.start : item.start + item.num_rows] = index
        table += len(item.block_table)
        if item.mask is not None:
            masks.append(item.mask.astype(np.uint8).ravel())
            mask += masks[-1].size
    tables = np.concatenate([item.block_table for item in batch.ranges]) if batch.ranges else np.zeros(0, np.int32)
    return ranges, range_of_row, tables, np.concatenate(masks) if masks else np.zeros(0, np.uint8)
