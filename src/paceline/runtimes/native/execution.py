"""A recorded network with the memory it runs in."""

import ctypes

import numpy as np

from paceline.errors import CheckpointError
from paceline.kv_cache.paged import BLOCK_SIZE
from paceline.models.config import ModelConfig
from paceline.runtimes.base import FloatArray, ForwardBatch
from paceline.runtimes.head import Draws
from paceline.runtimes.native.library import LANES, Operation, Program, kernels
from paceline.runtimes.native.passes import PassMemory
from paceline.runtimes.native.program import Code, Recorded
from paceline.runtimes.rotary import RotaryTables

_MIN_ROWS = 32
_MOST_ROPES = 2  # `Pass` of kernels/native.h has room for


class Execution:
    """Runs passes; the results lie in `rows(...)` until the next one.

    Args:
        num_threads: threads that share the work of a pass.
        max_slots: rows a sequence and its draft tree may have together; the cache may have room for less.
        tables: of rotary angles; needed where the network turns anything.
    """

    def __init__(
        self,
        config: ModelConfig,
        recorded: Recorded,
        *,
        num_threads: int,
        max_slots: int,
        tables: RotaryTables | None = None,
    ) -> None:
        self._recorded = recorded
        self._operations = (Operation * len(recorded.operations))(*recorded.operations)
        self._tickets = np.zeros(2 * len(recorded.operations), np.int32)
        attention = config.attention
        if len(config.ropes) > _MOST_ROPES:
            raise CheckpointError(f"the model rotates positions in {len(config.ropes)} ways, the kernels know at most {_MOST_ROPES}")
        self._max_slots, self._scratch_rows = max_slots, 1 + attention.num_heads // attention.num_kv_heads
        self.kernels = kernels()
        self._capacity = 0
        self._buffers: list[FloatArray] = []  # [capacity, width] each
        self.tables = tables if any(operation.code == Code.ROPE for operation in recorded.operations) else None
        self.memory = PassMemory(self.tables)
        self._program = Program(
            operations=self._operations, num_operations=len(recorded.operations), num_threads=num_threads, block_size=BLOCK_SIZE,
            heads=attention.num_heads, kv_heads=attention.num_kv_heads, head_size=attention.head_size,
            rotary_half=attention.rope.rotary_size(attention.head_size) // 2,
            most_columns=recorded.most_columns, tickets=self._tickets.ctypes.data,
        )  # fmt: skip
        self._make_scratch(0)
        self._packed_rows = np.empty(num_threads * self._packed_floats(1), np.float32)
        self._program.packed_rows = self._packed_rows.ctypes.data
        self._arguments = ctypes.pointer(self._program), ctypes.pointer(self.memory.record)
        self.make_room(_MIN_ROWS)

    @property
    def program(self) -> "ctypes._Pointer[Program]":
        """The network as the kernels are given it."""
        return self._arguments[0]

    def width(self, buffer: int) -> int:
        """Floats of a row of a buffer."""
        return self._recorded.widths[buffer]

    def use_cache(self, storage: FloatArray) -> None:
        """Read and write keys and values in `storage` (`ModelConfig.kv_shape`) from now on."""
        self._storage = storage
        self._program.cache = storage.ctypes.data
        self._program.num_blocks = storage.shape[1]
        self._make_scratch(min(self._max_slots, storage.shape[1] * BLOCK_SIZE))

    def _make_scratch(self, num_slots: int) -> None:
        """What attention over so many rows works in."""
        room = self._scratch_rows * (num_slots + LANES)
        self._scratch = [np.empty(room, np.float32) for _ in range(self._program.num_threads)]
        self._scratch_addresses = np.array([part.ctypes.data for part in self._scratch], np.uint64)
        self._program.scratch = self._scratch_addresses.ctypes.data
        self._program.max_context = num_slots

    def input_rows(self, num_rows: int, buffer: int = 0) -> FloatArray:
        """Where an input of a pass of `num_rows` rows is to be written, [num_rows, width]."""
        self.make_room(num_rows)
        return self.rows(buffer, num_rows)

    def rows(self, buffer: int, num_rows: int) -> FloatArray:
        """The first rows of a buffer, [num_rows, width]."""
        return self._buffers[buffer][:num_rows]

    def run(self, batch: ForwardBatch, draws: Draws | None = None) -> None:
        """One pass over rows whose first value has been written.

        Args:
            draws: [rankings, R], see `HeadRuntime.forward`.
        """
        self.memory.describe(batch, draws)
        self.kernels.paceline_run(*self._arguments)

    def _packed_floats(self, num_rows: int) -> int:
        """Memory for the rows of the widest product as its kernel takes them."""
        return int(self.kernels.paceline_packed_floats(num_rows, self._recorded.most_columns))

    def make_room(self, num_rows: int) -> None:
        """Buffers for at least so many rows; memory that no pass has touched costs nothing."""
        if num_rows <= self._capacity:
            return
        capacity, self._capacity = (
            max(_MIN_ROWS, 1 << (num_rows - 1).bit_length()),
            0,
        )  # an interrupt below leaves none: made anew next time
        self._buffers = [np.empty((capacity, width), np.float32) for width in self._recorded.widths]
        self._addresses = np.array([buffer.ctypes.data for buffer in self._buffers], np.uint64)
        self._packed = np.empty(self._packed_floats(capacity), np.float32)
        self._program.buffers = self._addresses.ctypes.data
        self._program.packed = self._packed.ctypes.data
        self._capacity = capacity
