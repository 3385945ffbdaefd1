"""The interface of a network: passes that take a ragged batch of rows, fill the cache, and return logits and hidden states."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.config import MAX_PASS_ROWS
from paceline.errors import BackendUnavailableError
from paceline.kv_cache.cache import KVCache
from paceline.kv_cache.full_attention import PagedCache
from paceline.kv_cache.recurrent_state import CHECKPOINT_DEFAULTS, CheckpointConfig
from paceline.kv_cache.row_plan import RowPlan
from paceline.kv_cache.sliding_window import PassLimits
from paceline.models.adapters.adapter import Adapter
from paceline.models.config import KVGroup, ModelConfig, WeightType
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.weights import Weights
from paceline.runtimes.decoder import BLOCK_MAX, COLLECTED, HIDDEN_STATES, LOGITS, SUMMARY, TOKEN_IDS, NetworkDefinition
from paceline.runtimes.logits_summary import LogitsSummary, RowSampling, SummaryOptions, decode_summaries

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
Item = TypeVar("Item")


class Numerics(Enum):
    """Whether a row's results have the same bits whatever other rows are in the pass (EXACT) or are only equal up to rounding (FAST)."""

    EXACT = "exact"
    FAST = "fast"


class RowRange(NamedTuple):
    """Rows [start, start + num_rows) of a pass, which continue one sequence.

    They attend to the sequence's `cached_len` rows in the cache, and to one another causally or by `mask`.

    Attributes:
        block_table: the sequence's cache blocks, with at least `cached_len + num_rows` slots.
        mask: [num_rows, num_rows], True = may attend; None = causal.
        first_visible_slot: rows do not attend to cached rows before this slot; at most `cached_len`. Only drafting heads set it.
        sequence_id: id of the sequence in its cache, by which recurrent layers find its state.
        adapter_number: the rows' LoRA adapter, as numbered by `Network.load_adapter`; 0 = none.
    """

    start: int
    num_rows: int
    cached_len: int
    block_table: IntArray
    mask: BoolArray | None = None
    first_visible_slot: int = 0
    sequence_id: int = 0
    adapter_number: int = 0

    def parents(self) -> tuple[int, ...]:
        """Return the parent of each row: the last earlier row of the range to which the row attends; -1 = the last cached row."""
        if self.mask is None:
            return tuple(range(-1, self.num_rows - 1))
        earlier = np.tril(self.mask, -1)
        last = earlier.shape[1] - 1 - earlier[:, ::-1].argmax(axis=1)
        return tuple(np.where(earlier.any(axis=1), last, -1).tolist())


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The T rows of one pass.

    Attributes:
        positions: [T] int32, rotary positions.
        ranges: the rows of each sequence, in order and without gaps; may be empty for a network without attention.

    Raises:
        ValueError: more than MAX_PASS_ROWS rows; the caller must use `split_into_passes`.
    """

    positions: IntArray
    ranges: tuple[RowRange, ...]

    def __post_init__(self) -> None:
        if len(self.positions) > MAX_PASS_ROWS:
            raise ValueError(f"a pass has at most {MAX_PASS_ROWS} rows, got {len(self.positions)}: split it")

    def rows_by_adapter(self) -> dict[int, IntArray]:
        """Return the ascending indices of the rows that use each adapter, by adapter number."""
        index_ranges: dict[int, list[IntArray]] = {}
        for item in self.ranges:
            if item.adapter_number:
                index_ranges.setdefault(item.adapter_number, []).append(np.arange(item.start, item.start + item.num_rows, dtype=np.int32))
        return {number: np.concatenate(indices) for number, indices in index_ranges.items()}


class LogitsRows(NamedTuple):
    """The rows of a pass whose logits are computed, and whether the logits themselves or summaries of them are returned.

    Attributes:
        rows: [R] int32, indices of rows, each at most once, in any order.
        summary: return only this summary of each row, for example its top tokens; None = return whole rows of logits.
        sampling: how to sample a token from each row, `SAMPLING_DTYPE` [number of logits results, R]; None = no token is sampled.
    """

    rows: IntArray
    summary: SummaryOptions | None = None
    sampling: RowSampling | None = None


class ForwardOutput:
    """The results of one pass. Arrays are views that the next pass of the same network overwrites.

    Args:
        results: float32 arrays by the result names of the `NetworkDefinition`. On a GPU, reading an array copies it to the CPU.
    """

    def __init__(self, results: Mapping[str, FloatArray]) -> None:
        self.results = results

    @property
    def logits(self) -> FloatArray:
        """Logits [R, V], in the order of `LogitsRows.rows`."""
        return self.results[LOGITS]

    @property
    def block_max(self) -> FloatArray | None:
        """Maximum of each block of BLOCK_COLUMNS logits of a row, [R, blocks]; None = not computed."""
        return self.results.get(BLOCK_MAX)

    @property
    def summaries(self) -> list[LogitsSummary]:
        """The summary of each row of logits, in the order of `LogitsRows.rows`. `LogitsRows.summary` must have been given."""
        return decode_summaries(self.results[SUMMARY])

    @property
    def hidden_states(self) -> FloatArray:
        """Hidden states [T, E] after the final norm."""
        return self.results[HIDDEN_STATES]

    @cached_property
    def collected_hidden_states(self) -> tuple[FloatArray, ...]:
        """Hidden states [T, E] at each collected layer boundary, see `decoder.decoder`."""
        return tuple(self.results[name] for name in self.results if name.startswith(f"{COLLECTED}."))

    def split_by_plan(self, plans: Sequence[RowPlan], logits_nodes: Sequence[Sequence[int]]) -> "list[PlanOutput]":
        """Return the results for each plan. `plans` and `logits_nodes` are those that `assemble_pass` was called with for this pass."""
        outputs: list[PlanOutput] = []
        first_row = first_logits_row = 0
        for plan, nodes in zip(plans, logits_nodes, strict=True):
            end = first_logits_row + len(nodes)
            outputs.append(PlanOutput(self, plan, first_row, first_logits_row, end))
            first_row, first_logits_row = first_row + plan.num_rows, end
        return outputs


class PlanOutput(NamedTuple):
    """The results of a pass for the rows of one `RowPlan`, that is, of one sequence.

    Attributes:
        pass_output: results of the whole pass.
        first_row: index in the pass of the plan's first row.
        first_logits_row, end_logits_row: the plan's logits are rows [first_logits_row, end_logits_row) of `pass_output.logits`.
    """

    pass_output: ForwardOutput
    plan: RowPlan
    first_row: int
    first_logits_row: int
    end_logits_row: int

    @property
    def logits(self) -> FloatArray:
        """Logits of the plan's `logits_nodes`, [len(logits_nodes), V], in the order given to `assemble_pass`."""
        return self.pass_output.logits[self.first_logits_row : self.end_logits_row]

    def hidden_states(self, nodes: Sequence[int]) -> FloatArray:
        """Return the final hidden states of these nodes of the draft tree, [len(nodes), E]; overwritten by the next pass."""
        return self.pass_output.hidden_states[self._pass_rows(nodes)]

    def collected_hidden_states(self, nodes: Sequence[int]) -> tuple[FloatArray, ...]:
        """Return the hidden states of these nodes at each collected layer boundary, [len(nodes), E]."""
        rows = self._pass_rows(nodes)
        return tuple(collected[rows] for collected in self.pass_output.collected_hidden_states)

    def _pass_rows(self, nodes: Sequence[int]) -> slice | list[int]:
        """Return the index in the pass of each node's row."""
        if isinstance(nodes, range):
            return slice(self.first_row + nodes.start, self.first_row + nodes.stop, nodes.step)
        return [self.first_row + node for node in nodes]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties of a loaded network on this machine: its numerics, its device and types."""

    numerics: Numerics
    device: str
    weight_type: WeightType
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.F32


class Network(ABC):
    """A loaded network: a language model or a drafting head. Not thread-safe: one pass at a time.

    Attributes:
        definition: function that defines what the network computes.
        execution_key: identifies the kernels, threads and types on which the bits of results depend; empty if the runtime is never exact.
        weights: weights of a language model, as they were read; None = not kept.
        has_window_eviction: whether sliding-window layers free cached rows that have left the window.
        num_passes: number of calls of `forward`, including those of networks that share the weights.
    """

    config: ModelConfig
    capabilities: Capabilities
    definition: NetworkDefinition
    execution_key: str = ""
    weights: Weights | None = None
    has_window_eviction = False
    num_passes: int

    @property
    def num_xlora_passes(self) -> int:
        """Number of scaling passes for X-LoRA adapters that were run, see `runtimes/xlora.py`."""
        return 0

    @property
    def supports_xlora(self) -> bool:
        """Whether X-LoRA adapters can be loaded: only after `enable_xlora`."""
        return False

    def enable_xlora(self, cache: KVCache) -> None:
        """Add layer caches for scaling passes to `cache`, so that X-LoRA adapters can be loaded.

        Args:
            cache: the cache that `new_cache` returned last, still empty.

        Raises:
            BackendUnavailableError: this kind of network does not support X-LoRA.
            CapacityError: the layer caches do not fit in memory.
            ConfigError: the model has layers that do not support X-LoRA.
        """
        raise BackendUnavailableError("mixtures of adapters cannot run on this kind of network: use a LoRA adapter")

    @abstractmethod
    def allocate_kv(self, num_blocks: int) -> Sequence[PagedCache]:
        """Allocate keys and values of `num_blocks` blocks. From now on this network and those with the same weights use them.

        Returns:
            A cache for each group of layers with the same shape of keys (`ModelConfig.kv_groups`).

        Raises:
            CapacityError: the cache does not fit in memory.
        """

    def new_cache(self, num_blocks: int, limits: PassLimits | None = None, checkpoints: CheckpointConfig = CHECKPOINT_DEFAULTS) -> KVCache:
        """Allocate the cache of all layers. From now on this network and those with the same weights use it.

        Args:
            limits: maximum load for which sliding-window layers get enough blocks; None = they get `num_blocks` blocks, too.
            checkpoints: after which rows recurrent states are kept, so that sequences with the same prefix can continue from them.
        """
        return KVCache(self.allocate_kv(num_blocks), num_blocks)

    def kv_arrays_of_layers(self, groups: Sequence[KVGroup], caches: Sequence[PagedCache]) -> list[Any]:
        """Return the arrays [keys of layer 0, values of layer 0, keys of layer 1, ...], each [num_blocks, K, block_size, D].

        A layer that reads another layer's keys and values has the arrays of that layer; a layer without attention has empty arrays. If
        values are a part of the keys (MLA), both are the same array.

        Args:
            groups: layers grouped by shape of keys, see `ModelConfig.kv_groups`.
            caches: the cache of each group.
        """
        config = self.config
        without_attention = [layer for layer in range(config.num_layers) if layer not in config.attention_layers]
        keys_and_values: dict[int, tuple[Any, Any]] = dict.fromkeys(without_attention, (np.zeros((0, 0, 0, 0), np.float32),) * 2)
        for group, cache in zip(groups, caches, strict=True):
            for index, layer in enumerate(group.layers):
                first = group.arrays_per_layer * index
                keys_and_values[layer] = (cache.storage[first], cache.storage[first + group.arrays_per_layer - 1])
        return [array for layer in range(config.num_layers) for array in keys_and_values[config.kv_source(layer)]]

    @abstractmethod
    def forward(self, inputs: Mapping[str, NDArray[Any]], batch: ForwardBatch, logits_rows: LogitsRows) -> ForwardOutput:
        """Run one pass and write keys and values of its rows to the cache.

        Args:
            inputs: arrays by input name. A language model has `token_ids` [T] int32; a drafting head has float32 rows [T, width].
        """

    @abstractmethod
    def embed(self, token_ids: IntArray) -> FloatArray:
        """Return embedding rows [T, E] float32 of `token_ids` [T]."""

    def load_adapter(self, adapter: Adapter) -> int:
        """Load a LoRA adapter, without merging it into the weights, and return its number for `RowRange.adapter_number`.

        Numbers begin at 1 and are not reused. Another thread may run passes at the same time.

        Raises:
            BackendUnavailableError: this kind of network does not support adapters.
            ConfigError: the adapter changes tensors that cannot be adapted here; all of them are listed.
        """
        raise BackendUnavailableError(f"the adapter {adapter.name!r} cannot run on this kind of network: merge it into the weights")

    def unload_adapter(self, number: int) -> None:
        """Free an adapter. No later pass may use its number."""
        raise KeyError(number)

    @abstractmethod
    def network_with_same_weights(self, definition: NetworkDefinition) -> "Network":
        """Return a network with another `definition` function that uses the same weights and the same cache."""

    def network_on_shared_kv(
        self, definition: NetworkDefinition, config: ModelConfig, weights: Weights, *, max_model_len: int
    ) -> "Network":
        """Return a network with other weights whose attention reads this network's keys and values and writes none.

        Args:
            config: config of its layers. `AttentionConfig.kv_source_layer` is the layer of this network whose KV cache a layer reads.
            weights: weights by the names that `definition` uses.
            max_model_len: maximum length of a sequence.

        Raises:
            BackendUnavailableError: this kind of network does not support it.
        """
        raise BackendUnavailableError("no drafter can read the keys and values of this kind of network: use another drafter")


class ForwardInputs(NamedTuple):
    """The arguments of `Network.forward` for a language model, see `assemble_pass`. `inputs` has token ids by the name of the input."""

    inputs: Mapping[str, IntArray]
    batch: ForwardBatch
    logits_rows: LogitsRows


def split_into_passes(items: Iterable[Item], count_rows: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield lists of successive items that together have at most MAX_PASS_ROWS rows, the limit of a pass. No item is split."""
    items_of_pass, total = list[Item](), 0
    for item in items:
        count = count_rows(item)
        if items_of_pass and total + count > MAX_PASS_ROWS:
            yield items_of_pass
            items_of_pass, total = [], 0
        items_of_pass.append(item)
        total += count
    if items_of_pass:
        yield items_of_pass


def assemble_pass(
    plans: Sequence[RowPlan],
    node_token_ids: Sequence[Sequence[int]],
    logits_nodes: Sequence[Sequence[int]],
    adapter_numbers: Sequence[int] | None = None,
) -> ForwardInputs:
    """Combine the rows of several sequences into one pass.

    Args:
        plans: for each sequence, where its rows are cached. Row i is node i of its draft tree.
        node_token_ids: for each plan, the token of each node.
        logits_nodes: for each plan, the nodes whose logits are computed, in the order in which they are returned.
        adapter_numbers: for each plan, the number of its adapter or 0; None = no plan has an adapter.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    ranges: list[RowRange] = []
    logits_rows: list[int] = []
    for plan, tokens, nodes, adapter in zip(plans, node_token_ids, logits_nodes, adapter_numbers or [0] * len(plans), strict=True):
        first_row, table = len(token_ids), np.asarray(plan.block_table, np.int32)
        token_ids.extend(tokens)
        positions.extend(plan.positions)
        ranges.append(RowRange(first_row, plan.num_rows, plan.committed_len, table, plan.mask, 0, plan.sequence_id, adapter))
        logits_rows.extend(first_row + node for node in nodes)
    batch = ForwardBatch(np.asarray(positions, np.int32), tuple(ranges))
    return ForwardInputs({TOKEN_IDS: np.asarray(token_ids, np.int32)}, batch, LogitsRows(np.asarray(logits_rows, np.int32)))
