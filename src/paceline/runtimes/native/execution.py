"""A recorded network with the memory it runs in."""

import ctypes
from collections.abc import Mapping, Sequence
from threading import Lock
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache.recurrent_state import RecurrentStateCache
from paceline.kv_cache.sliding_window import SlidingWindowCache
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.runtimes.base import FloatArray, ForwardBatch, Wanted
from paceline.runtimes.native.adapters import AdapterRows, NativeAdapter
from paceline.runtimes.native.aligned import empty, zeros
from paceline.runtimes.native.library import kernels
from paceline.runtimes.native.passes import PassMemory
from paceline.runtimes.native.program import Recorded, matrices_of
from paceline.runtimes.native.records import (
    PHASES,
    AttentionOperation,
    ConvolutionOperation,
    ExpertsOperation,
    KVKind,
    Program,
    RopeOperation,
    StateOperation,
)
from paceline.runtimes.rotary import RotaryTables

_MIN_ROWS = 32
_COUNTS_OF_A_LINE = 16  # of the caches: two lines, which some processors fetch together
_PARTS_FLOATS = 1 << 22  # for what splits of long contexts give; untouched memory costs nothing


class Execution:
    """Runs passes; the results lie in `rows(...)` until the next one.

    Args:
        num_threads: threads that share the work of a pass.
        tables: of rotary angles; needed where the network turns anything.
        adapters: of rows, by number; None = no row has one.
    """

    def __init__(
        self,
        recorded: Recorded,
        *,
        num_threads: int,
        tables: RotaryTables | None = None,
        adapters: Mapping[int, NativeAdapter] | None = None,
    ) -> None:
        self._recorded, operations = recorded, recorded.operations
        self._one_caller = Lock()  # who runs one network from two threads gets nothing of worth, but nobody reads freed memory
        self._operations = (ctypes.c_void_p * len(operations))(*map(ctypes.addressof, operations))
        self._tickets = np.zeros(PHASES * len(operations), np.int32)
        taken_a_thread = -(-PHASES * len(operations) // _COUNTS_OF_A_LINE) * _COUNTS_OF_A_LINE
        self._taken = zeros((num_threads, taken_a_thread), np.int64)
        attentions = [operation for operation in operations if isinstance(operation, AttentionOperation)]
        self._heads = {(operation.heads // operation.kv_heads, operation.head_size) for operation in attentions}
        self._most_columns = max([matrix.columns for operation in operations for matrix in matrices_of(operation)], default=0)
        self.kernels = kernels()
        self._capacity = 0
        self._buffers: list[FloatArray] = []  # [capacity, width] each
        self.memory = PassMemory(tables if any(isinstance(operation, RopeOperation) for operation in operations) else None)
        most_chosen = max((operation.chosen for operation in operations if isinstance(operation, ExpertsOperation)), default=0)
        self._adapter_rows = None if adapters is None else AdapterRows(adapters, recorded.sites, most_chosen)
        self._program = Program(
            operations=ctypes.addressof(self._operations), num_operations=len(operations), num_threads=num_threads,
            most_columns=self._most_columns, tickets=self._tickets.ctypes.data,
            taken=self._taken.ctypes.data, taken_a_thread=taken_a_thread,
        )  # fmt: skip
        self._has_states = any(isinstance(operation, ConvolutionOperation) for operation in operations)
        states = [operation for operation in operations if isinstance(operation, StateOperation)]
        self._block_floats = max((operation.rows_of_state * operation.block for operation in states), default=0)
        self._make_state_scratch(0)
        self._parts = empty((_PARTS_FLOATS if attentions else 0,))
        self._program.parts, self._program.parts_floats = self._parts.ctypes.data, self._parts.size
        self._packed_rows = empty((num_threads * self.kernels.paceline_packed_floats(1, self._most_columns),))
        self._program.packed_rows = self._packed_rows.ctypes.data
        self._arguments = ctypes.pointer(self._program), ctypes.pointer(self.memory.record)
        self.make_room(_MIN_ROWS)

    def use_cache(
        self,
        planes: Sequence[NDArray[np.uint8]],
        windows: Sequence[SlidingWindowCache] = (),
        states: RecurrentStateCache | None = None,
        kv_cache_dtype: KVCacheDtype = KVCacheDtype.F32,
    ) -> None:
        """Read and write keys and values here from now on.

        Args:
            planes: keys, then values of each layer in turn, each [num_blocks, K, bytes] with K and D of the layer's attention
                (`KVGroup.stored_shape`).
            windows: caches of layers with a window, in the order of `ModelConfig.windows`; none = their blocks are the cache's.
            states: the cache of recurrent layers.
            kv_cache_dtype: of the numbers in `planes`.
        """
        self._planes, self.memory.windows = list(planes), windows
        self.memory.state_cache = states if self._has_states else None
        self._plane_addresses = np.array([plane.ctypes.data for plane in self._planes], np.uint64)
        self._program.planes = self._plane_addresses.ctypes.data
        self._program.kv_kind = KVKind[kv_cache_dtype.name]

    def pieces_taken(self, index: int, phase: int) -> int:
        """Pieces of an operation that threads have taken in the last pass by their places."""
        counts = self._taken[:, PHASES * index + phase]
        return int((counts & 0xFFFFFFFF).sum() + (counts >> 32).sum())

    def _make_scratch(self, num_rows: int) -> None:
        """What attention of a pass of so many rows works in."""
        room = max((self.kernels.paceline_attention_floats(*heads, num_rows) for heads in self._heads), default=0)
        self._scratch = [empty((room,)) for _ in range(self._program.num_threads)]
        self._scratch_addresses = np.array([part.ctypes.data for part in self._scratch], np.uint64)
        self._program.scratch = self._scratch_addresses.ctypes.data

    def _make_state_scratch(self, num_slots: int) -> None:
        """Room for each thread's blocks of states: zeros, one of its own, and so many slots."""
        self._num_slots = num_slots
        self._state_scratch = zeros((self._program.num_threads, self._block_floats * (2 + num_slots)))
        self._program.state_scratch, self._program.state_floats = self._state_scratch.ctypes.data, self._state_scratch.shape[1]

    def input_rows(self, num_rows: int, buffer: int = 0) -> FloatArray:
        """Where an input of a pass of `num_rows` rows is to be written, [num_rows, width]."""
        self.make_room(num_rows)
        return self.rows(buffer, num_rows)

    def rows(self, buffer: int, num_rows: int, width: int | None = None) -> FloatArray:
        """The first rows of a buffer, [num_rows, width]; None = as wide as it is."""
        return self._buffers[buffer][:num_rows, :width]

    def address(self, buffer: int) -> int:
        """Of a buffer's first row, until there are more rows in a pass than ever before."""
        return self._starts[buffer]

    def run(self, batch: ForwardBatch, wanted: Wanted, scalings: Mapping[int, FloatArray] = MappingProxyType({})) -> None:
        """One pass over rows whose inputs have been written.

        Args:
            scalings: [rows, L * K] of the rows of each X-LoRA adapter, by its number.
        """
        if self._has_states and self.memory.state_cache is None:
            raise RuntimeError("a network with recurrent layers runs in a cache of its own: make one with new_cache")
        with self._one_caller:
            self.memory.describe(batch, wanted)
            if self._adapter_rows is not None:
                self._adapter_rows.describe(self.memory.record, batch, wanted, scalings)
            if self.memory.states.num_slots > self._num_slots:
                self._make_state_scratch(self.memory.states.num_slots)
            self.kernels.paceline_run(*self._arguments)

    def _packed_floats(self, num_rows: int) -> int:
        """Memory for the rows of any product as its kernel takes them. Five rows of one expert take as much as six, seven as eight."""
        sizes = {(num_rows, self._most_columns)}
        for operation in self._recorded.operations:
            if isinstance(operation, ExpertsOperation):
                sizes.add((num_rows * operation.chosen * 6 // 5 + 1, operation.matrices[0].columns))
        return max(int(self.kernels.paceline_packed_floats(*size)) for size in sizes)

    def make_room(self, num_rows: int) -> None:
        """Buffers for at least so many rows; memory that no pass has touched costs nothing."""
        if num_rows <= self._capacity:
            return
        with self._one_caller:
            self._make_buffers(num_rows)

    def _make_buffers(self, num_rows: int) -> None:
        self._capacity = 0  # an interrupt below leaves none: made anew next time
        capacity = max(_MIN_ROWS, 1 << (num_rows - 1).bit_length())
        self._buffers = [empty((capacity, width)) for width in self._recorded.widths]
        self._starts = [buffer.ctypes.data for buffer in self._buffers]
        self._addresses = np.array(self._starts, np.uint64)
        self._packed = empty((self._packed_floats(capacity),))
        self._make_scratch(capacity)
        self._program.buffers = self._addresses.ctypes.data
        self._program.packed = self._packed.ctypes.data
        self._capacity = capacity
