"""The interface of a network on any runtime: ragged rows in, logits and hidden states out, keys and values kept in the cache."""

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
from paceline.kv_cache.full_attention import FullAttentionCache
from paceline.kv_cache.recurrent_state import DEFAULT_CHECKPOINTS, CheckpointConfig
from paceline.kv_cache.row_plan import RowPlan, TreeLayout
from paceline.kv_cache.sliding_window import PassLimits
from paceline.models.adapters.adapter import Adapter
from paceline.models.config import ModelConfig, WeightType
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.weights import Weights
from paceline.runtimes.decoder import BLOCK_MAX, COLLECTED, HIDDEN_STATES, LOGITS, RANKED, TOKEN_IDS, Compose
from paceline.runtimes.ranking import Draws, RankedRow, Ranking, ranked_rows

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
Item = TypeVar("Item")


class Numerics(Enum):
    """Whether a row's bits are independent of the other rows in the pass (EXACT) or not (FAST)."""

    EXACT = "exact"
    FAST = "fast"


class RowRange(NamedTuple):
    """Consecutive rows of one path: rows [start, start + num_rows) of the batch.

    They attend to `cached_len` rows already in the cache and to one another (causally, or by `mask`).

    Attributes:
        block_table: covers at least `cached_len + num_rows` slots.
        mask: [num_rows, num_rows], True = may attend; None = causal.
        first_slot: cached rows before this slot are not attended to; at most `cached_len`. Only drafting heads use it.
        sequence_id, plan_row: row i of the range is row `plan_row + i` of the sequence's plan. Recurrent layers need both.
        adapter: the number `Network.load_adapter` returned; 0 = none.
    """

    start: int
    num_rows: int
    cached_len: int
    block_table: IntArray
    mask: BoolArray | None = None
    first_slot: int = 0
    sequence_id: int = 0
    plan_row: int = 0
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The rows of one ragged pass, T of them.

    Attributes:
        positions: [T] int32, rotary positions.
        ranges: the paths of the rows, in row order, without gaps. A network without attention needs none.

    Raises:
        ValueError: more than MAX_PASS_ROWS rows; the caller must use `split_into_passes`.
    """

    positions: IntArray
    ranges: tuple[RowRange, ...]

    def __post_init__(self) -> None:
        if len(self.positions) > MAX_PASS_ROWS:
            raise ValueError(f"a pass has at most {MAX_PASS_ROWS} rows, got {len(self.positions)}: split it")

    def rows_by_adapter(self) -> dict[int, IntArray]:
        """Return the rows of each adapter by its number, ascending; rows without an adapter are left out."""
        ranges: dict[int, list[IntArray]] = {}
        for item in self.ranges:
            if item.adapter:
                ranges.setdefault(item.adapter, []).append(np.arange(item.start, item.start + item.num_rows, dtype=np.int32))
        return {number: np.concatenate(own) for number, own in ranges.items()}


class LogitsRows(NamedTuple):
    """The rows of a pass whose logits are computed, and what is returned of them.

    Attributes:
        rows: [R] int32, each row at most once, in any order.
        ranking: how to summarise each row (its top tokens and log-sum); None = return the logits.
        draws: [rankings, R] `DRAW`: how to sample each row of each ranking, in the order the network records them; None = no sampling.
    """

    rows: IntArray
    ranking: Ranking | None = None
    draws: Draws | None = None


class ForwardOutput:
    """The results of one pass. Arrays are views that the next pass of the same network overwrites.

    Args:
        results: float32 arrays by the names of the network's composition; read lazily.
        address_of: returns the address of a result's first row by its name, where the runtime has it at hand; 0 = unknown.
    """

    def __init__(self, results: Mapping[str, FloatArray], address_of: Callable[[str], int] = lambda _: 0) -> None:
        self.results, self._address_of = results, address_of

    @property
    def logits(self) -> FloatArray:
        """[R, V], in the order of `LogitsRows.rows`."""
        return self.results[LOGITS]

    @property
    def block_max(self) -> FloatArray | None:
        """[R, blocks] the maximum of each block of a row of logits; None = not computed."""
        return self.results.get(BLOCK_MAX)

    @property
    def logits_address(self) -> int:
        """The address of the first row of logits; 0 = unknown."""
        return self._address_of(LOGITS)

    @property
    def block_max_address(self) -> int:
        """The address of the first row of `block_max`; 0 = unknown."""
        return self._address_of(BLOCK_MAX)

    @property
    def ranked(self) -> list[RankedRow]:
        """The rankings (top tokens and log-sum) of the rows of logits."""
        return ranked_rows(self.results[RANKED])

    @property
    def hidden_states(self) -> FloatArray:
        """[T, E], after the final norm."""
        return self.results[HIDDEN_STATES]

    @cached_property
    def collected_hidden_states(self) -> FloatArray | None:
        """[num_collected, T, E], see `decoder`; None = the network collects none."""
        names = [name for name in self.results if name.startswith(f"{COLLECTED}.")]
        return np.stack([self.results[name] for name in names]) if names else None

    def split_by_plan(self, plans: Sequence[RowPlan], logits_nodes: Sequence[Sequence[int]]) -> "list[PlanOutput]":
        """Return the results of each plan; the arguments are those given to `assemble`."""
        parts: list[PlanOutput] = []
        first_row = first_logits_row = 0
        for plan, nodes in zip(plans, logits_nodes, strict=True):
            end = first_logits_row + len(nodes)
            parts.append(PlanOutput(self, plan, first_row, first_logits_row, end))
            first_row, first_logits_row = first_row + len(plan.row_nodes), end
        return parts


class PlanOutput(NamedTuple):
    """The results of a pass for the rows of one plan.

    Attributes:
        output: results of the whole pass.
        first_row: the plan's first row in the pass.
        first_logits_row, end_logits_row: the plan's part of the rows of logits.
    """

    output: ForwardOutput
    plan: RowPlan
    first_row: int
    first_logits_row: int
    end_logits_row: int

    @property
    def logits(self) -> FloatArray:
        """[R of the plan, V], in the order of the `logits_nodes` given to `assemble`."""
        return self.output.logits[self.first_logits_row : self.end_logits_row]

    def hidden_states(self, nodes: Sequence[int]) -> FloatArray:
        """Return [len(nodes), E], valid until the next pass."""
        return self.output.hidden_states[self._rows(nodes)]

    def collected_hidden_states(self, nodes: Sequence[int]) -> FloatArray | None:
        """Return [num_collected, len(nodes), E]; None = the network collects none."""
        collected = self.output.collected_hidden_states
        return None if collected is None else collected[:, self._rows(nodes)]

    def _rows(self, nodes: Sequence[int]) -> slice | list[int]:
        if isinstance(nodes, range) and isinstance(self.plan.row_of_node, range):  # then row i is node i
            return slice(self.first_row + nodes.start, self.first_row + nodes.stop, nodes.step)
        return [self.first_row + self.plan.row_of_node[node] for node in nodes]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a network supports on this machine: numerics, tree layout, device and types."""

    numerics: Numerics
    tree_layout: TreeLayout
    device: str
    weight_type: WeightType
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.F32


class Network(ABC):
    """A loaded network: a language model or a drafting head. Not thread-safe: one caller, one pass at a time.

    Attributes:
        compose: what it computes.
        version: identifies what its bits depend on besides the weights; empty if they are not tested.
        weights: weights of a language model, as they were read; None = not kept.
    """

    config: ModelConfig
    capabilities: Capabilities
    compose: Compose
    version: str = ""
    weights: Weights | None = None
    num_passes: int  # calls of `forward`, including those of networks with the same weights

    @property
    def num_xlora_passes(self) -> int:
        """Number of extra passes that ran before real ones, for rows with X-LoRA adapters."""
        return 0

    @property
    def supports_xlora(self) -> bool:
        """Whether X-LoRA adapters can be loaded, that is, `enable_xlora` was called."""
        return False

    def enable_xlora(self, cache: KVCache) -> None:
        """Add to `cache` what the extra passes of mixtures need, so that adapters with a `XLoraMixture` can be loaded.

        Args:
            cache: the one `new_cache` returned last, still empty.

        Raises:
            BackendUnavailableError: this kind of network runs no mixtures.
            CapacityError: they do not fit in memory.
            ConfigError: the model has layers that cannot run them.
        """
        raise BackendUnavailableError("mixtures of adapters cannot run on this kind of network: use a LoRA adapter")

    @property
    def has_window_eviction(self) -> bool:
        """Whether sliding-window layers free the rows that have left their window."""
        return False

    @abstractmethod
    def allocate_kv(self, num_blocks: int) -> list[FullAttentionCache]:
        """Allocate keys and values of `num_blocks` blocks. This network and those with the same weights use them from now on.

        Returns:
            One for each shape of keys among the layers (`ModelConfig.kv_groups`).

        Raises:
            CapacityError: they do not fit in memory.
        """

    def new_cache(self, num_blocks: int, limits: PassLimits | None = None, checkpoints: CheckpointConfig = DEFAULT_CHECKPOINTS) -> KVCache:
        """Allocate the cache of all layers. This network and those with the same weights use it from now on.

        Args:
            limits: bounds on concurrent work; sliding-window layers may allocate for that much only.
            checkpoints: which states of recurrent layers are kept for other sequences.
        """
        return KVCache(self.allocate_kv(num_blocks), num_blocks, self.capabilities.tree_layout)

    @abstractmethod
    def forward(self, inputs: Mapping[str, NDArray[Any]], batch: ForwardBatch, logits_rows: LogitsRows) -> ForwardOutput:
        """Run one pass and write keys and values of its rows to the cache.

        Args:
            inputs: `token_ids` [T] int32 for a language model; rows [T, width] float32 by the names its composition uses for a head.
        """

    @abstractmethod
    def embed(self, token_ids: IntArray) -> FloatArray:
        """Return embedding rows [T, E] float32 of `token_ids` [T]."""

    def load_adapter(self, adapter: Adapter) -> int:
        """Load an adapter next to the weights and return the number that rows name it by (`RowRange.adapter`).

        Numbers begin at 1 and are not reused. Passes may run at the same time.

        Raises:
            BackendUnavailableError: this kind of network runs no adapters.
            ConfigError: the adapter changes tensors it cannot change here; all are listed.
        """
        raise BackendUnavailableError(f"the adapter {adapter.name!r} cannot run on this kind of network: merge it into the weights")

    def unload_adapter(self, number: int) -> None:
        """Free an adapter that no row uses any more."""
        raise KeyError(number)

    @abstractmethod
    def network_with_same_weights(self, compose: Compose) -> "Network":
        """Return another network over the same weights and the same cache."""

    def shared_kv_reader(self, compose: Compose, config: ModelConfig, weights: Weights, *, max_model_len: int) -> "Network":
        """Return a network with other weights that reads this one's keys and values and writes none.

        Args:
            config: of its layers; each one's `AttentionConfig.kv_layer` is the layer of this network that it reads.
            weights: by the names `compose` uses; not converted, computed in float32 on the CPU.
            max_model_len: positions to prepare for.

        Raises:
            BackendUnavailableError: this kind of network does not support it.
        """
        raise BackendUnavailableError("no drafter can read the keys and values of this kind of network: use another drafter")


class Pass(NamedTuple):
    """The arguments of `Network.forward` for a language model."""

    inputs: Mapping[str, IntArray]
    batch: ForwardBatch
    logits_rows: LogitsRows


def split_into_passes(items: Iterable[Item], num_rows: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield the items in order, in as few parts as possible with at most MAX_PASS_ROWS rows each. Every item must fit one pass."""
    part, total = list[Item](), 0
    for item in items:
        count = num_rows(item)
        if part and total + count > MAX_PASS_ROWS:
            yield part
            part, total = [], 0
        part.append(item)
        total += count
    if part:
        yield part


def assemble(
    plans: Sequence[RowPlan],
    node_token_ids: Sequence[Sequence[int]],
    logits_nodes: Sequence[Sequence[int]],
    adapters: Sequence[int] | None = None,
) -> Pass:
    """Combine the rows of several plans into one pass.

    Args:
        plans: the rows of each sequence.
        node_token_ids: per plan, the token of each node.
        logits_nodes: per plan, the nodes whose logits are computed; logits are returned in this order.
        adapters: per plan, the number of its adapter; None = no plan has one.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    ranges: list[RowRange] = []
    logits_rows: list[int] = []
    for plan, tokens, nodes, adapter in zip(plans, node_token_ids, logits_nodes, adapters or [0] * len(plans), strict=True):
        base, is_straight = len(token_ids), isinstance(plan.row_nodes, range)  # then row i is node i
        token_ids.extend(tokens if is_straight else (tokens[node] for node in plan.row_nodes))
        positions.extend(plan.row_positions)
        for first_row, num_rows, _, block_table, mask in plan.paths:
            table = np.asarray(block_table, np.int32)
            ranges.append(RowRange(base + first_row, num_rows, plan.committed_len, table, mask, 0, plan.sequence_id, first_row, adapter))
        if is_straight and isinstance(nodes, range):
            logits_rows.extend(range(base + nodes.start, base + nodes.stop, nodes.step))
        else:
            logits_rows.extend(base + plan.row_of_node[node] for node in nodes)
    batch = ForwardBatch(np.asarray(positions, np.int32), tuple(ranges))
    return Pass({TOKEN_IDS: np.asarray(token_ids, np.int32)}, batch, LogitsRows(np.asarray(logits_rows, np.int32)))
