"""What every network promises, on whatever it runs: ragged rows in, logits and hidden states out, keys and values kept in the cache."""

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

NO_MIXTURE_WITH_STATES = (
    "X-LoRA's scaling pass would need states of its own, and the model has recurrent layers: use its adapters one by one"
)


class Numerics(Enum):
    """Whether a row's bits may depend on what else is in the pass."""

    EXACT = "exact"
    FAST = "fast"


class RowRange(NamedTuple):
    """Consecutive rows of one path: rows [start, start + num_rows) of the batch.

    They attend to `cached_len` rows already in the cache and to one another (causally, or by `mask`).
    `block_table` covers at least `cached_len + num_rows` slots. Of the cached rows those before slot `first_slot` are not seen,
    which only heads use; it is at most `cached_len`.

    Row i of the range is row `plan_row + i` of the plan of sequence `sequence_id`; layers that keep something per sequence need both.

    `adapter` is the number that `Network.load_adapter` gave; 0 = none.
    """

    start: int
    num_rows: int
    cached_len: int
    block_table: IntArray
    mask: BoolArray | None = None  # [num_rows, num_rows], True = may attend
    first_slot: int = 0
    sequence_id: int = 0
    plan_row: int = 0
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The rows of one ragged pass, T of them.

    Attributes:
        positions: [T] int32, rotary positions.
        ranges: the paths the rows belong to, in row order, without gaps. A network without attention needs none.

    Raises:
        ValueError: more than MAX_PASS_ROWS rows. That is no want of memory: whoever asks must ask in parts.
    """

    positions: IntArray
    ranges: tuple[RowRange, ...]

    def __post_init__(self) -> None:
        if len(self.positions) > MAX_PASS_ROWS:
            raise ValueError(f"a pass of {len(self.positions)} rows was asked for, at most {MAX_PASS_ROWS} are possible: ask in parts")


class Wanted(NamedTuple):
    """What is wanted of the rows of a pass besides hidden states, which can be had of all of them.

    Attributes:
        rows: [R] int32, those whose logits are wanted (each once, any order).
        ranking: what is to be found in their logits; None = nothing, the logits themselves are wanted.
        draws: [rankings, R] `DRAW`: how the token of each row is drawn, in the order in which the network has its logits; None = none is.
    """

    rows: IntArray
    ranking: Ranking | None = None
    draws: Draws | None = None


class ForwardOutput:
    """What one pass returns; arrays are views that the next pass of the same network overwrites.

    Args:
        results: float32, by the names that the network's composition gives them; looked up only when asked for.
        address_of: where the first row of a result lies, by its name, for a runtime that knows without asking the array; 0 = it does not.
    """

    def __init__(self, results: Mapping[str, FloatArray], address_of: Callable[[str], int] = lambda _: 0) -> None:
        self.results, self._address_of = results, address_of

    @property
    def logits(self) -> FloatArray:
        """[R, V], in the order of `Wanted.rows`."""
        return self.results[LOGITS]

    @property
    def block_max(self) -> FloatArray | None:
        """[R, blocks] the largest logit of each block of a row; None = unknown."""
        return self.results.get(BLOCK_MAX)

    @property
    def logits_at(self) -> int:
        """Where the first row of logits lies; 0 = the runtime does not know."""
        return self._address_of(LOGITS)

    @property
    def block_max_at(self) -> int:
        """The same of `block_max`."""
        return self._address_of(BLOCK_MAX)

    @property
    def ranked(self) -> list[RankedRow]:
        """What was found in each row of logits."""
        return ranked_rows(self.results[RANKED])

    @property
    def hidden_states(self) -> FloatArray:
        """[T, E], after the final norm."""
        return self.results[HIDDEN_STATES]

    @cached_property
    def collected_hidden_states(self) -> FloatArray | None:
        """[num_collected, T, E], see `decoder`; None = nothing was to be collected."""
        names = [name for name in self.results if name.startswith(f"{COLLECTED}.")]
        return np.stack([self.results[name] for name in names]) if names else None

    def by_plan(self, plans: Sequence[RowPlan], logits_nodes: Sequence[Sequence[int]]) -> "list[PlanOutput]":
        """The part of each plan; arguments as `assemble` got them."""
        parts: list[PlanOutput] = []
        first_row = first_logits_row = 0
        for plan, wanted in zip(plans, logits_nodes, strict=True):
            end = first_logits_row + len(wanted)
            parts.append(PlanOutput(self, plan, first_row, first_logits_row, end))
            first_row, first_logits_row = first_row + len(plan.row_nodes), end
        return parts


class PlanOutput(NamedTuple):
    """What a pass returned for the rows of one plan.

    Attributes:
        output: of the whole pass.
        first_row: of the plan in the pass.
        first_logits_row, end_logits_row: of the pass's rows of logits, those of the plan.
    """

    output: ForwardOutput
    plan: RowPlan
    first_row: int
    first_logits_row: int
    end_logits_row: int

    @property
    def logits(self) -> FloatArray:
        """[R of the plan, V], in the order its nodes were asked for."""
        return self.output.logits[self.first_logits_row : self.end_logits_row]

    def hidden_states(self, nodes: Sequence[int]) -> FloatArray:
        """[len(nodes), E] those of the plan's `nodes`, until the next pass."""
        return self.output.hidden_states[self._rows(nodes)]

    def collected_hidden_states(self, nodes: Sequence[int]) -> FloatArray | None:
        """[num_collected, len(nodes), E] those of the plan's `nodes`; None where nothing was collected."""
        collected = self.output.collected_hidden_states
        return None if collected is None else collected[:, self._rows(nodes)]

    def _rows(self, nodes: Sequence[int]) -> slice | list[int]:
        if isinstance(nodes, range) and isinstance(self.plan.row_of_node, range):  # then row i is node i
            return slice(self.first_row + nodes.start, self.first_row + nodes.stop, nodes.step)
        return [self.first_row + self.plan.row_of_node[node] for node in nodes]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a network can do on this machine."""

    numerics: Numerics
    tree_layout: TreeLayout
    device: str
    weight_type: WeightType
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.F32


class Network(ABC):
    """A loaded network, a language model or a head that guesses for one. Not thread-safe: one caller, one pass at a time.

    Attributes:
        compose: what it computes.
        version: names what its bits depend on besides the weights; empty where they are not tested.
        weights: of a language model, as they were read; None = they are not kept.
    """

    config: ModelConfig
    capabilities: Capabilities
    compose: Compose
    version: str = ""
    weights: Weights | None = None
    num_passes: int  # how often `forward` ran, here and in the networks beside it

    @property
    def num_scaling_passes(self) -> int:
        """In how many of these passes rows with X-LoRA took one more, in front of the real one, for their scalings."""
        return 0

    @property
    def takes_mixtures(self) -> bool:
        """Whether X-LoRA adapters can be loaded: `keep_scaling_passes` was called."""
        return False

    def keep_scaling_passes(self, cache: KVCache) -> None:
        """Let X-LoRA adapters be loaded: scaling passes keep keys and values in layer caches of their own, which are added to `cache`.

        Args:
            cache: as `new_cache` gave it last, still empty.

        Raises:
            BackendUnavailableError: this kind of network computes no X-LoRA.
            CapacityError: the memory cannot be had.
            ConfigError: the model has layers with which X-LoRA cannot be computed.
        """
        raise BackendUnavailableError("X-LoRA adapters cannot run on this kind of network: use one of LoRA")

    @property
    def holds_windows(self) -> bool:
        """Whether layers with a window keep no more rows than it needs."""
        return False

    @abstractmethod
    def new_key_values(self, num_blocks: int) -> list[FullAttentionCache]:
        """Allocate the keys and values of `num_blocks` blocks, which this network and those beside it read and write from now on.

        There is one for each size that layers' keys have (`ModelConfig.kv_groups`).

        Raises:
            CapacityError: the memory cannot be had.
        """

    def new_cache(self, num_blocks: int, limits: PassLimits | None = None, checkpoints: CheckpointConfig = DEFAULT_CHECKPOINTS) -> KVCache:
        """Allocate a cache for this network, as `new_key_values` does.

        Args:
            limits: what will run in it at a time: layers with a window may take memory for that alone.
            checkpoints: which states of recurrent layers are kept for other sequences.
        """
        return KVCache(self.new_key_values(num_blocks), num_blocks, self.capabilities.tree_layout)

    @abstractmethod
    def forward(self, inputs: Mapping[str, NDArray[Any]], batch: ForwardBatch, wanted: Wanted) -> ForwardOutput:
        """Run one pass; keys and values of its rows are in the cache when it returns.

        Args:
            inputs: by the names the network asks for: `token_ids` [T] int32 of a language model, rows [T, width] float32 of a head.
        """

    @abstractmethod
    def embed(self, token_ids: IntArray) -> FloatArray:
        """Embedding rows [T, E] float32 of `token_ids` [T], of a language model."""

    def load_adapter(self, adapter: Adapter) -> int:
        """The number by which rows of a pass ask for an adapter, from 1 on; no number comes twice. Passes may run meanwhile.

        Raises:
            BackendUnavailableError: this kind of network runs none.
            ConfigError: the adapter changes something that it cannot change here; every such name is listed.
        """
        raise BackendUnavailableError(f"the adapter {adapter.name!r} cannot run on this kind of network: merge it into the weights")

    def unload_adapter(self, number: int) -> None:
        """Free an adapter that no row asks for any more."""
        raise KeyError(number)

    @abstractmethod
    def beside(self, compose: Compose) -> "Network":
        """Another network of the same weights and the same cache."""

    def reader(self, compose: Compose, config: ModelConfig, weights: Weights, *, max_model_len: int) -> "Network":
        """A network of other weights that reads the keys and values of this one, in whatever cache it has, and writes none.

        Args:
            config: of its layers; `AttentionConfig.kv_layer` of each is the layer of this network that it reads.
            weights: under the names `compose` uses; computed with as stored, in float32 on the CPU.
            max_model_len: positions to prepare for.

        Raises:
            BackendUnavailableError: this kind of network has none.
        """
        raise BackendUnavailableError("nothing can read the keys and values of this kind of network: use another drafter")


class Pass(NamedTuple):
    """The arguments of `Network.forward` for a language model."""

    inputs: Mapping[str, IntArray]
    batch: ForwardBatch
    wanted: Wanted


def no_room_for_mixture(name: str) -> str:
    """What is wrong where the X-LoRA adapter of this name is loaded and nothing is kept of scaling passes."""
    return (
        f"the X-LoRA adapter {name!r} needs a second set of keys and values, which is planned when a model is opened: give it, or another "
        "X-LoRA adapter, in adapters= (--adapter) then"
    )


def in_parts(items: Iterable[Item], num_rows: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Items in order, in as few parts as it takes for the rows of each part to fit one pass; an item's rows must."""
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
    """Lay the rows of several plans into one pass.

    Args:
        plans: what each sequence runs.
        node_token_ids: per plan, the token of each node.
        logits_nodes: per plan, the nodes whose logits are wanted; their logits come in this order.
        adapters: per plan, the number of its adapter; None = no plan has one.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    ranges: list[RowRange] = []
    logits_rows: list[int] = []
    for plan, tokens, wanted, adapter in zip(plans, node_token_ids, logits_nodes, adapters or [0] * len(plans), strict=True):
        base, is_straight = len(token_ids), isinstance(plan.row_nodes, range)  # then row i is node i
        token_ids.extend(tokens if is_straight else (tokens[node] for node in plan.row_nodes))
        positions.extend(plan.row_positions)
        for first_row, num_rows, _, block_table, mask in plan.paths:
            table = np.asarray(block_table, np.int32)
            ranges.append(RowRange(base + first_row, num_rows, plan.committed_len, table, mask, 0, plan.sequence_id, first_row, adapter))
        if is_straight and isinstance(wanted, range):
            logits_rows.extend(range(base + wanted.start, base + wanted.stop, wanted.step))
        else:
            logits_rows.extend(base + plan.row_of_node[node] for node in wanted)
    batch = ForwardBatch(np.asarray(positions, np.int32), tuple(ranges))
    return Pass({TOKEN_IDS: np.asarray(token_ids, np.int32)}, batch, Wanted(np.asarray(logits_rows, np.int32)))
