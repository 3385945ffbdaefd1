"""Run a recorded network: allocate buffers and scratch memory, fill the records of a pass, call the kernels."""

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
from paceline.runtimes.native.adapters import AdapterMapping, NativeAdapter
from paceline.runtimes.native.aligned import aligned_empty, aligned_zeros
from paceline.runtimes.native.library import kernels
from paceline.runtimes.native.passes import PassRecord
from paceline.runtimes.native.program import NativeOps, matrices_of
from paceline.runtimes.native.records import (
    MAX_OPERATION_PHASES,
    AttentionOperation,
    ConvolutionOperation,
    ExpertsOperation,
    KVKind,
    Program,
    RopeOperation,
    StateOperation,
)
from paceline.runtimes.native.rotary import RotaryTables

_MIN_CAPACITY_ROWS = 32  # minimum number of rows of a buffer
_WORK_COUNTER_ALIGNMENT = 16  # int64 counters of a thread start on pairs of cache lines, because some processors fetch lines in pairs
_SPLIT_RESULTS_FLOATS = 1 << 22  # memory for attention results of splits (kernels/attention.h); pages that are never written take no memory


class Execution:
    """Runs passes of a recorded network. Results are in the buffers (`buffer_rows`) until the next pass.

    Args:
        ops: the recorded network after `assign_buffers`.
        widths: width of each buffer, in floats.
        num_threads: threads among which the work of a pass is divided.
        tables: tables of rotary angles; None = the network has no rotary embedding.
        adapters: loaded adapters by number; None = adapters are not supported.
    """

    def __init__(
        self,
        ops: NativeOps,
        widths: Sequence[int],
        *,
        num_threads: int,
        tables: RotaryTables | None = None,
        adapters: Mapping[int, NativeAdapter] | None = None,
    ) -> None:
        operations = self._recorded_operations = ops.operations
        self._widths = widths
        self._call_lock = Lock()  # callers must not call concurrently; the lock only prevents reads of freed memory if they do
        self._operations = (ctypes.c_void_p * len(operations))(*map(ctypes.addressof, operations))
        self._tickets = np.zeros(MAX_OPERATION_PHASES * len(operations), np.int32)
        claims_per_thread = -(-MAX_OPERATION_PHASES * len(operations) // _WORK_COUNTER_ALIGNMENT) * _WORK_COUNTER_ALIGNMENT
        self._claims = aligned_zeros((num_threads, claims_per_thread), np.int64)
        attention_layers = [operation for operation in operations if isinstance(operation, AttentionOperation)]
        self._head_shapes = {(operation.heads // operation.kv_heads, operation.head_size) for operation in attention_layers}
        self._max_columns = max([matrix.columns for operation in operations for matrix in matrices_of(operation)], default=0)
        self.kernels = kernels()
        self._capacity = 0
        self._buffers: list[FloatArray] = []  # each [capacity in rows, width]
        self.pass_record = PassRecord(tables if any(isinstance(operation, RopeOperation) for operation in operations) else None)
        max_experts = max((operation.experts_per_row for operation in operations if isinstance(operation, ExpertsOperation)), default=0)
        self._adapter_mapping = None if adapters is None else AdapterMapping(adapters, ops.sites, max_experts)
        self._program = Program(
            operations=ctypes.addressof(self._operations), num_operations=len(operations), num_threads=num_threads,
            max_columns=self._max_columns, tickets=self._tickets.ctypes.data,
            claims=self._claims.ctypes.data, claims_per_thread=claims_per_thread,
        )  # fmt: skip
        self._has_states = any(isinstance(operation, ConvolutionOperation) for operation in operations)
        states = [operation for operation in operations if isinstance(operation, StateOperation)]
        self._block_floats = max((operation.rows_of_state * operation.block_columns for operation in states), default=0)
        self._make_state_scratch(0)
        self._split_results = aligned_empty((_SPLIT_RESULTS_FLOATS if attention_layers else 0,))
        self._program.split_results, self._program.split_results_floats = self._split_results.ctypes.data, self._split_results.size
        self._packed_rows = aligned_empty((num_threads * self.kernels.paceline_packed_floats(1, self._max_columns),))
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
            kv_storage: keys and values of each layer (`kv_arrays_of_layers`), each [num_blocks, K, bytes] (`KVGroup.stored_shape`).
            windows: caches of sliding-window layers, as in `ModelConfig.sliding_kv_groups`; empty = all layers use the same block tables.
            states: states of recurrent layers.
            kv_cache_dtype: type of the numbers in `kv_storage`.
        """
        self._kv_storage, self.pass_record.windows = list(kv_storage), windows
        self.pass_record.recurrent = states if self._has_states else None
        self._kv_address_array = np.array([array.ctypes.data for array in self._kv_storage], np.uint64)
        self._program.kv_storage = self._kv_address_array.ctypes.data
        self._program.kv_kind = KVKind[kv_cache_dtype.name]

    def _make_state_scratch(self, num_states: int) -> None:
        """Allocate for each thread one state block of zeros, one for intermediate results, and `num_states` temporary states."""
        self._num_temporary_states = num_states
        self._state_scratch = aligned_zeros((self._program.num_threads, self._block_floats * (2 + num_states)))
        self._program.state_scratch, self._program.state_floats = self._state_scratch.ctypes.data, self._state_scratch.shape[1]

    def buffer_rows(self, buffer: int, num_rows: int, width: int | None = None) -> FloatArray:
        """Return the first rows and columns of a buffer as [num_rows, width]; width None = all columns."""
        return self._buffers[buffer][:num_rows, :width]

    def run(self, batch: ForwardBatch, logits_rows: LogitsRows, scalings: Mapping[int, FloatArray] = MappingProxyType({})) -> None:
        """Run one pass, whose inputs the caller has written to the input buffers.

        Args:
            scalings: see `xlora.Scalings`.
        """
        if self._has_states and self.pass_record.recurrent is None:
            raise RuntimeError("a network with recurrent layers needs a cache: call new_cache")
        with self._call_lock:
            self.pass_record.fill(batch, logits_rows)
            if self._adapter_mapping is not None:
                self._adapter_mapping.fill(self.pass_record.record, batch, logits_rows, scalings)
            if self.pass_record.states.num_temporary_states > self._num_temporary_states:
                self._make_state_scratch(self.pass_record.states.num_temporary_states)
            self.kernels.paceline_run(*self._arguments)

    def _max_packed_floats(self, num_rows: int) -> int:
        """Return the largest number of floats that the packed input rows of a product take in a pass of `num_rows` rows."""
        sizes = {(num_rows, self._max_columns)}
        for operation in self._recorded_operations:
            if isinstance(operation, ExpertsOperation):
                sizes.add((num_rows * operation.experts_per_row * 6 // 5 + 1, operation.matrices[0].columns))
        return max(int(self.kernels.paceline_packed_floats(*size)) for size in sizes)

    def reserve_rows(self, num_rows: int) -> None:
        """Enlarge the buffers to at least `num_rows` rows, if they are smaller."""
        if num_rows > self._capacity:
            with self._call_lock:
                self._allocate_buffers(num_rows)

    def _allocate_buffers(self, num_rows: int) -> None:
        self._capacity = 0  # after an interrupt (Ctrl-C) in this function, the next pass allocates again
        capacity = max(_MIN_CAPACITY_ROWS, 1 << (num_rows - 1).bit_length())
        self._buffers = [aligned_empty((capacity, width)) for width in self._widths]
        self._buffer_address_array = np.array([buffer.ctypes.data for buffer in self._buffers], np.uint64)
        self._packed = aligned_empty((self._max_packed_floats(capacity),))
        attention_floats = max((self.kernels.paceline_attention_floats(*shape, capacity) for shape in self._head_shapes), default=0)
        self._scratch = [aligned_empty((attention_floats,)) for _ in range(self._program.num_threads)]
        self._scratch_address_array = np.array([part.ctypes.data for part in self._scratch], np.uint64)
        self._program.scratch = self._scratch_address_array.ctypes.data
        self._program.buffers = self._buffer_address_array.ctypes.data
        self._program.packed_inputs = self._packed.ctypes.data
        self._capacity = capacity
