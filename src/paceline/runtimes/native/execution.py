"""Run a recorded network: owns its buffers, scratch memory and the pass record."""

import ctypes
from collections.abc import Mapping, Sequence
from threading import Lock
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache.recurrent_state import RecurrentStateCache
from paceline.kv_cache.sliding_window import SlidingWindowCache
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.runtimes.base import FloatArray, ForwardBatch, LogitsRows
from paceline.runtimes.native.adapters import AdapterRows, NativeAdapter
from paceline.runtimes.native.aligned import empty, zeros
from paceline.runtimes.native.library import kernels
from paceline.runtimes.native.passes import PassRecord
from paceline.runtimes.native.program import RecordedNetwork, matrices_of
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
from paceline.runtimes.native.rotary import RotaryTables

_MIN_CAPACITY_ROWS = 32
_CLAIMS_PER_CACHE_LINES = 16  # claim counters are two cache lines apart, which some processors fetch together
_SPLIT_RESULTS_FLOATS = 1 << 22  # room for partial results of split long contexts; untouched memory costs nothing


class Execution:
    """Runs passes of a recorded network; results are in `rows(...)` until the next pass.

    Args:
        num_threads: threads that share the work of a pass.
        tables: tables of rotary angles; needed if the network rotates anything.
        adapters: by number; None = rows cannot have adapters.
    """

    def __init__(
        self,
        recorded: RecordedNetwork,
        *,
        num_threads: int,
        tables: RotaryTables | None = None,
        adapters: Mapping[int, NativeAdapter] | None = None,
    ) -> None:
        self._recorded, operations = recorded, recorded.operations
        self._call_lock = Lock()  # concurrent calls on one network give wrong results, but must not read freed memory
        self._operations = (ctypes.c_void_p * len(operations))(*map(ctypes.addressof, operations))
        self._tickets = np.zeros(PHASES * len(operations), np.int32)
        claims_per_thread = -(-PHASES * len(operations) // _CLAIMS_PER_CACHE_LINES) * _CLAIMS_PER_CACHE_LINES
        self._claims = zeros((num_threads, claims_per_thread), np.int64)
        attention_layers = [operation for operation in operations if isinstance(operation, AttentionOperation)]
        self._heads = {(operation.heads // operation.kv_heads, operation.head_size) for operation in attention_layers}
        self._max_columns = max([matrix.columns for operation in operations for matrix in matrices_of(operation)], default=0)
        self.kernels = kernels()
        self._capacity = 0
        self._buffers: list[FloatArray] = []  # [capacity, width] each
        self.pass_record = PassRecord(tables if any(isinstance(operation, RopeOperation) for operation in operations) else None)
        max_chosen = max((operation.chosen for operation in operations if isinstance(operation, ExpertsOperation)), default=0)
        self._adapter_rows = None if adapters is None else AdapterRows(adapters, recorded.sites, max_chosen)
        self._program = Program(
            operations=ctypes.addressof(self._operations), num_operations=len(operations), num_threads=num_threads,
            max_columns=self._max_columns, tickets=self._tickets.ctypes.data,
            claims=self._claims.ctypes.data, claims_per_thread=claims_per_thread,
        )  # fmt: skip
        self._has_states = any(isinstance(operation, ConvolutionOperation) for operation in operations)
        states = [operation for operation in operations if isinstance(operation, StateOperation)]
        self._block_floats = max((operation.rows_of_state * operation.block for operation in states), default=0)
        self._make_state_scratch(0)
        self._split_results = empty((_SPLIT_RESULTS_FLOATS if attention_layers else 0,))
        self._program.split_results, self._program.split_results_floats = self._split_results.ctypes.data, self._split_results.size
        self._packed_rows = empty((num_threads * self.kernels.paceline_packed_floats(1, self._max_columns),))
        self._program.packed_rows = self._packed_rows.ctypes.data
        self._arguments = ctypes.pointer(self._program), ctypes.pointer(self.pass_record.record)
        self.reserve_rows(_MIN_CAPACITY_ROWS)

    def set_cache(
        self,
        kv_storage: Sequence[NDArray[np.uint8]],
        windows: Sequence[SlidingWindowCache] = (),
        states: RecurrentStateCache | None = None,
        kv_cache_dtype: KVCacheDtype = KVCacheDtype.F32,
    ) -> None:
        """Use this cache from now on.

        Args:
            kv_storage: keys and values of each layer in turn (`kv_arrays_of_layers`), each [num_blocks, K, bytes] (`KVGroup.stored_shape`).
            windows: caches of sliding-window layers, in the order of `ModelConfig.windows`; none = they use the common block tables.
            states: of recurrent layers.
            kv_cache_dtype: type of the numbers in `kv_storage`.
        """
        self._kv_storage, self.pass_record.windows = list(kv_storage), windows
        self.pass_record.recurrent = states if self._has_states else None
        self._kv_addresses = np.array([array.ctypes.data for array in self._kv_storage], np.uint64)
        self._program.kv_storage = self._kv_addresses.ctypes.data
        self._program.kv_kind = KVKind[kv_cache_dtype.name]

    def num_claimed_pieces(self, index: int, phase: int) -> int:
        """Return how many pieces of an operation threads claimed in the last pass (kernels/work.h)."""
        counts = self._claims[:, PHASES * index + phase]
        return int((counts & 0xFFFFFFFF).sum() + (counts >> 32).sum())

    def _make_scratch(self, num_rows: int) -> None:
        """Allocate attention's scratch memory for a pass of `num_rows` rows."""
        floats = max((self.kernels.paceline_attention_floats(*heads, num_rows) for heads in self._heads), default=0)
        self._scratch = [empty((floats,)) for _ in range(self._program.num_threads)]
        self._scratch_addresses = np.array([part.ctypes.data for part in self._scratch], np.uint64)
        self._program.scratch = self._scratch_addresses.ctypes.data

    def _make_state_scratch(self, num_slots: int) -> None:
        """Allocate blocks of recurrent states for each thread: a zero state, a working state, and `num_slots` temporary states."""
        self._num_slots = num_slots
        self._state_scratch = zeros((self._program.num_threads, self._block_floats * (2 + num_slots)))
        self._program.state_scratch, self._program.state_floats = self._state_scratch.ctypes.data, self._state_scratch.shape[1]

    def input_rows(self, num_rows: int, buffer: int = 0) -> FloatArray:
        """Return the array [num_rows, width] of an input buffer, to be written before the next pass."""
        self.reserve_rows(num_rows)
        return self.rows(buffer, num_rows)

    def rows(self, buffer: int, num_rows: int, width: int | None = None) -> FloatArray:
        """Return the first rows of a buffer as [num_rows, width]; width None = its full width."""
        return self._buffers[buffer][:num_rows, :width]

    def address(self, buffer: int) -> int:
        """Return the address of a buffer, valid until `reserve_rows` grows it."""
        return self._starts[buffer]

    def run(self, batch: ForwardBatch, logits_rows: LogitsRows, scalings: Mapping[int, FloatArray] = MappingProxyType({})) -> None:
        """Run one pass over rows whose inputs have been written.

        Args:
            scalings: [rows, L * K] of the rows of each mixture of adapters, by its number.
        """
        if self._has_states and self.pass_record.recurrent is None:
            raise RuntimeError("a network with recurrent layers needs a cache: call new_cache")
        with self._call_lock:
            self.pass_record.fill(batch, logits_rows)
            if self._adapter_rows is not None:
                self._adapter_rows.fill(self.pass_record.record, batch, logits_rows, scalings)
            if self.pass_record.states.num_slots > self._num_slots:
                self._make_state_scratch(self.pass_record.states.num_slots)
            self.kernels.paceline_run(*self._arguments)

    def _packed_floats(self, num_rows: int) -> int:
        """Return the number of floats that packed input rows of the largest product take; rows are padded to the kernels' row counts."""
        sizes = {(num_rows, self._max_columns)}
        for operation in self._recorded.operations:
            if isinstance(operation, ExpertsOperation):
                sizes.add((num_rows * operation.chosen * 6 // 5 + 1, operation.matrices[0].columns))
        return max(int(self.kernels.paceline_packed_floats(*size)) for size in sizes)

    def reserve_rows(self, num_rows: int) -> None:
        """Grow the buffers to at least `num_rows` rows. Untouched memory costs nothing."""
        if num_rows <= self._capacity:
            return
        with self._call_lock:
            self._make_buffers(num_rows)

    def _make_buffers(self, num_rows: int) -> None:
        self._capacity = 0  # if an interrupt follows, the buffers are allocated again
        capacity = max(_MIN_CAPACITY_ROWS, 1 << (num_rows - 1).bit_length())
        self._buffers = [empty((capacity, width)) for width in self._recorded.widths]
        self._starts = [buffer.ctypes.data for buffer in self._buffers]
        self._addresses = np.array(self._starts, np.uint64)
        self._packed = empty((self._packed_floats(capacity),))
        self._make_scratch(capacity)
        self._program.buffers = self._addresses.ctypes.data
        self._program.packed = self._packed.ctypes.data
        self._capacity = capacity
