"""Heads on our own kernels."""

from collections.abc import Mapping

import numpy as np

from paceline.errors import CapacityError
from paceline.kv_cache.paged import BLOCK_SIZE, KVCache
from paceline.kv_cache.row_plan import TreeLayout
from paceline.models.config import ModelConfig, WeightType
from paceline.models.weights import Weights
from paceline.runtimes.base import FloatArray, ForwardBatch
from paceline.runtimes.head import MAX_HEAD_ROWS, Compose, HeadRuntime
from paceline.runtimes.native.execution import Execution
from paceline.runtimes.native.program import NativeBlocks, Recorded, most_columns, share_memory
from paceline.runtimes.native.weights import NativeWeights
from paceline.runtimes.rotary import rotary_tables


class NativeHead(HeadRuntime):
    """A recorded network and the memory it runs in; the weights stay where they are."""

    def __init__(self, compose: Compose, config: ModelConfig, weights: Weights, *, num_threads: int, max_context: int) -> None:
        self.config = config
        self._shared = _Shared(
            NativeWeights(weights, WeightType.F32),
            rotary_tables(config, max_context + MAX_HEAD_ROWS),
            num_threads,
            max_context + MAX_HEAD_ROWS,
        )
        self._record(compose)

    @property
    def num_passes(self) -> int:  # type: ignore[override]
        return self._shared.num_passes

    def forward(self, inputs: Mapping[str, FloatArray], batch: ForwardBatch) -> Mapping[str, FloatArray]:
        num_rows = len(batch.positions)
        if num_rows > MAX_HEAD_ROWS:
            raise CapacityError(f"a pass of {num_rows} rows was asked of a head, at most {MAX_HEAD_ROWS} are possible")
        self._shared.num_passes += 1
        execution = self._execution
        for name, buffer in self._inputs.items():
            execution.input_rows(num_rows, buffer)[...] = inputs[name]
        execution.run(batch, [(cos[batch.positions], sin[batch.positions]) for cos, sin in self._shared.tables])
        num_selected = len(batch.logits_rows)
        return {name: execution.rows(buffer, num_selected if selected else num_rows) for name, (buffer, selected) in self._outputs.items()}

    def new_cache(self, num_blocks: int) -> KVCache:
        config = self.config
        shape = (2 * config.num_layers, num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_size)
        try:
            storage = np.zeros(shape, np.float32)
        except MemoryError as error:
            raise CapacityError(f"a drafter's cache of {num_blocks} blocks does not fit in memory: lower cache_gb") from error
        self._shared.storage = storage
        for execution in self._shared.executions:
            execution.use_cache(storage)
        return KVCache(storage, TreeLayout.MASK)

    def beside(self, compose: Compose) -> "NativeHead":
        other = NativeHead.__new__(NativeHead)
        other.config, other._shared = self.config, self._shared
        other._record(compose)
        return other

    def _record(self, compose: Compose) -> None:
        shared = self._shared
        blocks = NativeBlocks(self.config, shared.weights)
        outputs = compose(blocks)
        buffers, widths = share_memory(blocks, {value.index for value in outputs.values()})
        self._inputs = {name: buffers[value.index] for name, value in blocks.inputs.items()}
        self._outputs = {name: (buffers[value.index], value.selected) for name, value in outputs.items()}
        recorded = Recorded(blocks.operations, blocks.matrices, widths, 0, 0, [], most_columns(blocks))
        self._execution = Execution(self.config, recorded, num_threads=shared.num_threads, max_slots=shared.max_slots)
        if shared.storage is not None:
            self._execution.use_cache(shared.storage)
        shared.executions.append(self._execution)


class _Shared:
    """What networks beside one another have in common."""

    def __init__(self, weights: NativeWeights, tables: list[tuple[FloatArray, FloatArray]], num_threads: int, max_slots: int) -> None:
        self.weights, self.tables, self.num_threads, self.max_slots = weights, tables, num_threads, max_slots
        self.storage: FloatArray | None = None
        self.executions: list[Execution] = []
        self.num_passes = 0
