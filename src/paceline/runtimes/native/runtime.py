"""The CPU runtime of our own kernels: weights are read as they are stored, and no row's bits depend on its neighbours."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import MAX_PASS_ROWS
from paceline.errors import CapacityError
from paceline.kv_cache.key_values import KeyValues
from paceline.kv_cache.paged import BLOCK_SIZE, KVCache
from paceline.kv_cache.row_plan import TreeLayout
from paceline.models.config import ModelConfig, WeightType
from paceline.models.mapped_files import MappedFiles
from paceline.models.weights import AnyTensor, GroupedTensor, Weights
from paceline.runtimes.base import Capabilities, FloatArray, ForwardBatch, ForwardOutput, IntArray, Numerics, RowRange, Runtime
from paceline.runtimes.native.execution import Execution
from paceline.runtimes.native.library import kernels_path
from paceline.runtimes.native.panels import Panels
from paceline.runtimes.native.program import Recorded, record
from paceline.runtimes.native.weights import NativeWeights
from paceline.runtimes.rotary import LEAST_POSITIONS, RotaryTables
from paceline.runtimes.rounding import embedding_rows, scaled_rows


class NativeRuntime(Runtime):
    """Runs ragged passes of one network. Values are float32 between products; weights keep the type they are stored in."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        num_threads: int,
        max_context: int,
        collect_layers: Sequence[int] = (),
        round_to: WeightType,
        panels: dict[str, Panels] | None = None,
    ) -> None:
        """Record the network; the weights stay where they are.

        Args:
            max_context: of the longest text there can be.
            collect_layers: boundaries to return, 0 to L.
            round_to: type the weights' values are rounded to first, where they are stored in another.
            panels: matrices in groups that a runtime of the same weights has laid out, by name; the others are added, and rows are rounded
                to 8 bits in front of them (kernels/panels.c). None = groups stay as they are, and so do rows.

        Raises:
            BackendUnavailableError: there are no kernels for this machine.
        """
        self.config = config
        self.num_passes = 0
        self.collect_layers = tuple(collect_layers)
        self.capabilities = Capabilities(Numerics.EXACT, TreeLayout.MASK, "cpu", WeightType.F32)
        self._num_threads = num_threads
        self._round_to = round_to
        self.weights = weights
        self._native_weights = NativeWeights(weights, round_to, panels=panels, num_threads=num_threads)
        self._tables = RotaryTables(config, max_context)
        self._max_slots = max(max_context, LEAST_POSITIONS) + MAX_PASS_ROWS
        recorded = record(config, self._native_weights, collect_layers)
        self._recorded = recorded
        self._embedding = (panels or {}).get("embedding") or weights["embedding.weight"]  # a tied matrix is read where products read it
        self._files = MappedFiles([*self._native_weights.arrays, *_arrays(self._embedding)])
        self._execution = self._executed(recorded)
        path = kernels_path()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path is not None else "none"
        self.version = f"kernels {digest}, {num_threads} threads"
        self.new_cache(2)
        self._warm_up()

    def new_cache(self, num_blocks: int) -> KVCache:
        try:
            storage = np.zeros(self.config.kv_shape(num_blocks, BLOCK_SIZE), np.float32)
        except MemoryError as error:
            raise CapacityError(f"a cache of {num_blocks} blocks does not fit in memory: lower cache_gb") from error
        self._execution.use_cache(storage)
        return KVCache([KeyValues(storage)], num_blocks, self.capabilities.tree_layout)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        num_rows = len(batch.token_ids)
        self._files.check()
        self.num_passes += 1
        execution, recorded = self._execution, self._recorded
        execution.input_rows(num_rows)[...] = self.embed(batch.token_ids)
        execution.run(batch)
        collected = None
        if self.collect_layers:
            collected = np.stack([execution.rows(buffer, num_rows) for buffer in recorded.collected])
        logits = execution.rows(recorded.logits, len(batch.logits_rows))
        return ForwardOutput(logits, execution.rows(recorded.hidden, num_rows), collected)

    def embed(self, token_ids: IntArray) -> FloatArray:
        if isinstance(self._embedding, Panels):
            return scaled_rows(self._embedding.rows(token_ids), self.config, self._round_to)
        return embedding_rows(self._embedding, token_ids, self.config, self._round_to)

    def _executed(self, recorded: Recorded) -> Execution:
        return Execution(recorded, num_threads=self._num_threads, max_slots=self._max_slots, tables=self._tables)

    def _warm_up(self) -> None:
        """Read every weight once, so that the first request finds them in memory."""
        row = np.zeros(1, np.int32)
        self.forward(ForwardBatch(row, row, (RowRange(0, 1, 0, np.array([1], np.int32)),), row))
        self.num_passes = 0


def _arrays(embedding: AnyTensor | Panels) -> tuple[NDArray[Any], ...]:
    if isinstance(embedding, Panels):
        return (embedding.data,)
    return embedding.matrix.arrays if isinstance(embedding, GroupedTensor) else (embedding.array,)
