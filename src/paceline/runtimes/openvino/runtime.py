"""The CPU runtime: one compiled graph, one infer request, keys and values in memory we own."""

from collections.abc import Sequence

import numpy as np
import openvino as ov

from paceline.errors import CapacityError
from paceline.kv_cache.block_pool import SCRATCH_BLOCK
from paceline.kv_cache.paged import BLOCK_SIZE, KVCache
from paceline.kv_cache.row_plan import TreeLayout
from paceline.models.config import ModelConfig, WeightType
from paceline.models.mapped_files import MappedFiles
from paceline.models.weights import GroupedTensor, Weights, as_float32
from paceline.runtimes.base import Capabilities, FloatArray, ForwardBatch, ForwardOutput, IntArray, Numerics, RowRange, Runtime
from paceline.runtimes.numerics import RowPadding
from paceline.runtimes.openvino.attention import attention_inputs
from paceline.runtimes.openvino.blocks import ROTARY_INPUTS
from paceline.runtimes.openvino.graph import build_graph, build_lm_head
from paceline.runtimes.openvino.weights import NUMPY_TYPE, GraphWeights, shared_tensor
from paceline.runtimes.rotary import RotaryTables
from paceline.runtimes.rounding import embedding_rows, rounded


class OpenVINORuntime(Runtime):
    """Runs ragged passes of one network on the CPU."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        weight_type: WeightType,
        num_threads: int,
        max_context: int,
        collect_layers: Sequence[int] = (),
        round_to: WeightType | None = None,
    ) -> None:
        """Compile the graph and make the plugin pack the weights.

        Args:
            weight_type: type of computation and cache, `graph.computable` of what is wanted.
            max_context: of the longest text there can be.
            collect_layers: boundaries to return, 0 to L; fixed, because the outputs of a graph are part of its function.
            round_to: type the weights' values are rounded to first.
        """
        self.config = config
        self.num_passes = 0
        self.num_threads = num_threads
        self.collect_layers = tuple(collect_layers)
        self.padding = RowPadding.NONE
        self.capabilities = Capabilities(Numerics.FAST, TreeLayout.MASK, "cpu", weight_type)
        self._round_to = round_to or weight_type
        graph_weights = GraphWeights(weights, weight_type, self._round_to)
        self._weight_type = weight_type
        self._weights = weights  # keeps the files mapped: embedding rows are read from them at every pass
        self._embedding = weights["embedding.weight"]
        graph = build_graph(config, graph_weights, collect_layers, num_threads)
        self._inputs = graph.inputs
        self.graph_digest = graph.digest
        self.version = f"openvino {ov.__version__}, {num_threads} threads, graph {graph.digest}"
        self._request = graph.compiled.create_infer_request()
        self._rotary_tables = RotaryTables(config, max_context)
        self._lm_head: ov.CompiledModel | None = None
        self._files = MappedFiles(())
        self._buffers: dict[str, np.ndarray] = {}  # what the request's input tensors point into
        self.new_cache(2)
        self._warm_up()
        graph_weights.drop_matrices()
        self._vectors = graph_weights.vectors
        self._files = MappedFiles(weights.stored("embedding.weight"))

    def new_cache(self, num_blocks: int) -> KVCache:
        config = self.config
        kind = self._weight_type
        shape = (2 * config.num_layers, num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_size)
        try:
            storage = np.zeros(shape, NUMPY_TYPE[kind])
        except MemoryError as error:
            raise CapacityError(f"a cache of {num_blocks} blocks does not fit in memory: lower cache_gb") from error
        for layer in range(config.num_layers):
            self._set(f"keys.{layer}", shared_tensor(storage[2 * layer], kind))
            self._set(f"values.{layer}", shared_tensor(storage[2 * layer + 1], kind))
        self._storage = storage
        return KVCache(storage, self.capabilities.tree_layout)

    def set_numerics(self, padding: RowPadding, numerics: Numerics) -> None:
        """Fix how lone rows are padded and what is promised; call before `new_cache`."""
        layout = TreeLayout.PATHS if numerics is Numerics.EXACT else TreeLayout.MASK
        self.padding = padding
        self.capabilities = Capabilities(numerics, layout, "cpu", self._weight_type)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        if self.padding is RowPadding.WHOLE_ROW and any(item.num_rows == 1 for item in batch.ranges):
            padded, kept = repeat_lone_rows(batch)
            output = self._run(padded)
            collected = output.collected_hidden_states
            return ForwardOutput(output.logits, output.hidden_states[kept], None if collected is None else collected[:, kept])
        return self._run(batch)

    def _run(self, batch: ForwardBatch) -> ForwardOutput:
        self._files.check()
        self.num_passes += 1
        rows = attention_inputs(batch, repeat_lone_rows=self.padding is RowPadding.ATTENTION)
        rows["embedded"] = self.embed(batch.token_ids)
        rows["logits_rows"] = batch.logits_rows
        rows |= self._angles(batch.positions)
        for name, value in rows.items():
            self._feed(name, value)
        self._request.infer()
        collected = None
        if self.collect_layers:
            collected = np.stack([self._request.get_output_tensor(2 + i).data for i in range(len(self.collect_layers))])
        return ForwardOutput(self._request.get_output_tensor(0).data, self._request.get_output_tensor(1).data, collected)

    def _angles(self, positions: IntArray) -> dict[str, FloatArray]:
        """cos and sin [T, 1, R / 2] float32 by the graph's names."""
        self._rotary_tables.reach(int(positions.max(initial=0)))
        rows: dict[str, FloatArray] = {}
        for names, pair in zip(ROTARY_INPUTS, self._rotary_tables.pairs, strict=False):
            rows |= {name: table[positions][:, None] for name, table in zip(names, pair, strict=True)}
        return rows

    def embed(self, token_ids: IntArray) -> FloatArray:
        return embedding_rows(self._embedding, token_ids, self.config, self._round_to)

    def lm_head(self, hidden_states: FloatArray) -> FloatArray:
        if self._lm_head is None:
            head = self._weights["embedding.weight" if self.config.tied_embeddings else "lm_head.weight"]
            values = as_float32(head) if isinstance(head, GroupedTensor) else rounded(as_float32(head), self._round_to)
            self._lm_head = build_lm_head(values, self._weight_type, self.num_threads)
        logits = np.asarray(self._lm_head([hidden_states])[0])
        cap = self.config.logit_soft_cap
        return logits if cap is None else np.tanh(logits / np.float32(cap)) * np.float32(cap)

    def _feed(self, name: str, value: np.ndarray) -> None:
        """Give an input its value; making and setting a tensor costs more than all else, so one of the same shape is written over."""
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == value.shape:
            buffer[...] = value
            return
        self._buffers[name] = value.copy()
        self._set(name, ov.Tensor(self._buffers[name], shared_memory=True))

    def _set(self, name: str, tensor: ov.Tensor) -> None:
        self._request.set_input_tensor(self._inputs[name], tensor)

    def _warm_up(self) -> None:
        """Make the plugin pack every matrix, so that the source buffers can go."""
        block = np.array([1], np.int32)
        for num_rows in (1, BLOCK_SIZE):
            rows = np.arange(num_rows, dtype=np.int32)
            self._run(ForwardBatch(np.zeros(num_rows, np.int32), rows, (RowRange(0, num_rows, 0, block),), rows))
        self.num_passes = 0


def repeat_lone_rows(batch: ForwardBatch) -> tuple[ForwardBatch, IntArray]:
    """The batch with each lone row doubled through the whole network, and the rows of it that were there before."""
    rows: list[int] = []
    kept: list[int] = []
    ranges: list[RowRange] = []
    for item in batch.ranges:
        start = len(rows)
        kept.extend(range(start, start + item.num_rows))
        rows.extend(range(item.start, item.start + item.num_rows))
        table, count = item.block_table, item.num_rows
        if count == 1:
            rows.append(item.start)
            count = 2
            if len(table) * BLOCK_SIZE < item.cached_len + 2:
                table = np.append(table, np.int32(SCRATCH_BLOCK))
        ranges.append(RowRange(start, count, item.cached_len, table, item.mask))
    taken = np.array(rows, np.int32)
    new_row = np.array(kept, np.int32)
    return ForwardBatch(batch.token_ids[taken], batch.positions[taken], tuple(ranges), new_row[batch.logits_rows]), new_row
