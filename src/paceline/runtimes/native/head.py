"""Heads on our own kernels."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from paceline.config import MAX_PASS_ROWS
from paceline.errors import CapacityError
from paceline.kv_cache.paged import BLOCK_SIZE, KVCache
from paceline.kv_cache.row_plan import TreeLayout
from paceline.models.config import ModelConfig, WeightType
from paceline.models.mapped_files import MappedFiles
from paceline.models.weights import AnyTensor, Tensor, Weights
from paceline.runtimes.base import FloatArray, ForwardBatch
from paceline.runtimes.head import Compose, Draws, Grower, GrowerNames, HeadRuntime, HeadsGrower
from paceline.runtimes.native.execution import Execution
from paceline.runtimes.native.growing import GrowerNetwork, NativeGrower
from paceline.runtimes.native.growing_heads import LastNetwork, NativeHeadsGrower
from paceline.runtimes.native.library import MOST_INPUTS
from paceline.runtimes.native.program import NativeBlocks, Recorded, share_memory
from paceline.runtimes.native.records import RankOperation, Rows
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

    def grower(self, drafted: HeadRuntime, embedding: AnyTensor, names: GrowerNames) -> Grower | None:
        if not isinstance(drafted, NativeHead) or not isinstance(embedding, Tensor) or self.config.embedding_scale != 1.0:
            return None
        if set(self._inputs) != {names.embedding, *names.true_features} or set(drafted._inputs) != {names.embedding, names.feature}:
            return None
        if len(names.true_features) > MOST_INPUTS or not (self._ranks and drafted._ranks):
            return None
        true = self._grower_network(names, names.true_features)
        own = drafted._grower_network(names, [names.feature])
        return NativeGrower(true, own, embedding, self._ranks[0], self._count_passes, self._shared.weights.arrays)

    def _grower_network(self, names: GrowerNames, features: Sequence[str]) -> GrowerNetwork:
        inputs, outputs = self._inputs, self._outputs
        taken = [inputs[name] for name in features]
        return GrowerNetwork(self._execution, inputs[names.embedding], taken, outputs[names.feature][0], outputs[names.ranked][0])

    def heads_grower(self, feature: str, heads: Sequence[str], lm_head: tuple[HeadRuntime, str, str] | None) -> HeadsGrower | None:
        results = [self._outputs[name][0] for name in heads]
        files = self._shared.files
        if lm_head is None:
            count = self._ranks[0]
            return NativeHeadsGrower(self._execution, self._inputs[feature], results, count, self._count_passes, files, None)
        network, hidden, ranked = lm_head
        if not isinstance(network, NativeHead):
            return None
        last = LastNetwork(network._execution, network._inputs[hidden], network._outputs[ranked][0])
        count = network._ranks[0]
        return NativeHeadsGrower(self._execution, self._inputs[feature], results, count, self._count_passes, files, last)

    def _count_passes(self, count: int) -> None:
        self._shared.num_passes += count

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
        self._ranks = [operation.count for operation in blocks.operations if isinstance(operation, RankOperation)]
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
