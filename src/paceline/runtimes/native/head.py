"""Heads on our own kernels."""

from collections.abc import Iterator, Mapping

import numpy as np

from paceline.config import MAX_PASS_ROWS
from paceline.errors import CapacityError
from paceline.kv_cache.key_values import PagedRows
from paceline.kv_cache.paged import BLOCK_SIZE
from paceline.models.config import ModelConfig, WeightType
from paceline.models.mapped_files import MappedFiles
from paceline.models.weights import Weights
from paceline.runtimes.base import FloatArray, ForwardBatch
from paceline.runtimes.head import Compose, Draws, HeadRuntime
from paceline.runtimes.native.execution import Execution
from paceline.runtimes.native.program import NativeBlocks, Recorded, share_memory
from paceline.runtimes.native.records import Rows
from paceline.runtimes.native.weights import NativeWeights
from paceline.runtimes.rotary import RotaryTables


class NativeHead(HeadRuntime):
    """A recorded network and the memory it runs in; the weights stay where they are."""

    def __init__(self, compose: Compose, config: ModelConfig, weights: Weights, *, num_threads: int, max_context: int) -> None:
        self.config = config
        self._shared = _Shared(
            NativeWeights(weights, WeightType.F32),
            RotaryTables(config, max_context + MAX_PASS_ROWS),
            num_threads,
            max_context + MAX_PASS_ROWS,
        )
        self._record(compose)

    @property
    def num_passes(self) -> int:  # type: ignore[override]
        return self._shared.num_passes

    def forward(self, inputs: Mapping[str, FloatArray], batch: ForwardBatch, draws: Draws | None = None) -> Mapping[str, FloatArray]:
        num_rows = len(batch.positions)
        self._shared.files.check()
        self._shared.num_passes += 1
        execution = self._execution
        execution.make_room(num_rows)
        for name, buffer in self._inputs.items():
            execution.rows(buffer, num_rows)[...] = inputs[name]
        execution.run(batch, draws)
        return _Results(execution, self._outputs, num_rows, len(batch.logits_rows))

    def new_cache(self, num_blocks: int) -> PagedRows:
        try:
            storage = np.zeros(self.config.kv_shape(num_blocks, BLOCK_SIZE), np.float32)
        except MemoryError as error:
            raise CapacityError(f"a drafter's cache of {num_blocks} blocks does not fit in memory: lower cache_gb") from error
        self._shared.storage = storage
        for execution in self._shared.executions:
            execution.use_cache(storage)
        return PagedRows(storage)

    def beside(self, compose: Compose) -> "NativeHead":
        other = NativeHead.__new__(NativeHead)
        other.config, other._shared = self.config, self._shared
        other._record(compose)
        return other

    def _record(self, compose: Compose) -> None:
        shared = self._shared
        self.compose = compose
        blocks = NativeBlocks(self.config, shared.weights)
        outputs = compose(blocks)
        buffers, widths = share_memory(blocks, {value.index for value in outputs.values()})
        self._inputs = {name: buffers[value.index] for name, value in blocks.inputs.items()}
        self._outputs = {name: (buffers[value.index], value.rows, blocks.result_width(value)) for name, value in outputs.items()}
        recorded = Recorded(blocks.operations, widths, 0, 0, [])
        self._execution = Execution(recorded, num_threads=shared.num_threads, max_slots=shared.max_slots, tables=shared.tables)
        if shared.storage is not None:
            self._execution.use_cache(shared.storage)
        shared.executions.append(self._execution)
        shared.files = MappedFiles(shared.weights.arrays)


class _Results(Mapping[str, FloatArray]):
    """Views of results, made when they are asked for."""

    __slots__ = ("_execution", "_num_rows", "_outputs")

    def __init__(self, execution: Execution, outputs: dict[str, tuple[int, Rows, int]], num_rows: int, num_selected: int) -> None:
        self._execution, self._outputs, self._num_rows = execution, outputs, (num_rows, num_selected)

    def __getitem__(self, name: str) -> FloatArray:
        buffer, rows, width = self._outputs[name]
        return self._execution.rows(buffer, self._num_rows[rows])[:, :width]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)


class _Shared:
    """What networks beside one another have in common."""

    def __init__(self, weights: NativeWeights, tables: RotaryTables, num_threads: int, max_slots: int) -> None:
        self.weights, self.tables, self.num_threads, self.max_slots = weights, tables, num_threads, max_slots
        self.storage: FloatArray | None = None
        self.executions: list[Execution] = []
        self.num_passes = 0
        self.files = MappedFiles(())
