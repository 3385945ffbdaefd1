"""What every runtime promises: ragged rows in, logits and hidden states out, keys and values kept in the cache."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.config import MAX_PASS_ROWS
from paceline.kv_cache.paged import KVCache
from paceline.kv_cache.row_plan import RowPlan, TreeLayout
from paceline.models.config import ModelConfig, WeightType

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
Item = TypeVar("Item")


class Numerics(Enum):
    """Whether a row's bits may depend on what else is in the pass."""

    EXACT = "exact"
    FAST = "fast"


@dataclass(frozen=True, slots=True)
class RowRange:
    """Consecutive rows of one path: rows [start, start + num_rows) of the batch.

    They attend to `cached_len` rows already in the cache and to one another (causally, or by `mask`).
    `block_table` covers at least `cached_len + num_rows` slots. Of the cached rows those before slot `first_slot` are not seen,
    which only the networks of `runtimes/head.py` use; it is at most `cached_len`.

    Row i of the range is row `plan_row + i` of the plan of sequence `sequence_id`; layers that keep something per sequence need both.
    """

    start: int
    num_rows: int
    cached_len: int
    block_table: IntArray
    mask: BoolArray | None = None  # [num_rows, num_rows], True = may attend
    first_slot: int = 0
    sequence_id: int = 0
    plan_row: int = 0


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One ragged pass of T rows.

    Attributes:
        token_ids: [T] int32.
        positions: [T] int32, rotary positions.
        ranges: the paths the rows belong to, in row order, without gaps.
        logits_rows: [R] int32, rows whose logits are wanted (each once, any order).

    Raises:
        ValueError: more than MAX_PASS_ROWS rows. That is no want of memory: whoever asks must ask in parts.
    """

    token_ids: IntArray
    positions: IntArray
    ranges: tuple[RowRange, ...]
    logits_rows: IntArray

    def __post_init__(self) -> None:
        if len(self.positions) > MAX_PASS_ROWS:
            raise ValueError(f"a pass of {len(self.positions)} rows was asked for, at most {MAX_PASS_ROWS} are possible: ask in parts")


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What one pass returns; arrays are views that the next pass of the same runtime overwrites.

    Attributes:
        logits: [R, V] float32, in the order of `logits_rows`.
        hidden_states: [T, E] float32, after the final norm.
        collected_hidden_states: [num_collected, T, E] float32: the residual stream at the layer boundaries
            the runtime was built to collect (boundary i is the input of layer i; L is the last layer's output).
    """

    logits: FloatArray
    hidden_states: FloatArray
    collected_hidden_states: FloatArray | None = None

    def by_plan(self, plans: Sequence[RowPlan], logits_nodes: Sequence[Sequence[int]]) -> "Iterator[PlanOutput]":
        """The part of each plan; arguments as `assemble` got them."""
        first_row = first_logits_row = 0
        for plan, wanted in zip(plans, logits_nodes, strict=True):
            end = first_logits_row + len(wanted)
            yield PlanOutput(self, plan, first_row, self.logits[first_logits_row:end])
            first_row, first_logits_row = first_row + plan.num_rows, end


@dataclass(frozen=True, slots=True)
class PlanOutput:
    """What a pass returned for the rows of one plan.

    Attributes:
        output: of the whole pass.
        first_row: of the plan in the pass.
        logits: [R of the plan, V] float32, in the order its nodes were asked for.
    """

    output: ForwardOutput
    plan: RowPlan
    first_row: int
    logits: FloatArray

    def hidden_states(self, nodes: Sequence[int]) -> FloatArray:
        """[len(nodes), E] those of the plan's `nodes`; a copy."""
        return self.output.hidden_states[self._rows(nodes)]

    def collected_hidden_states(self, nodes: Sequence[int]) -> FloatArray | None:
        """[num_collected, len(nodes), E] those of the plan's `nodes`; a copy, None where nothing was collected."""
        collected = self.output.collected_hidden_states
        return None if collected is None else collected[:, self._rows(nodes)]

    def _rows(self, nodes: Sequence[int]) -> list[int]:
        return [self.first_row + self.plan.row_of_node[node] for node in nodes]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runtime can do on this machine."""

    numerics: Numerics
    tree_layout: TreeLayout
    device: str
    weight_type: WeightType


class Runtime(ABC):
    """A loaded network. Not thread-safe: one caller, one pass at a time."""

    config: ModelConfig
    capabilities: Capabilities
    num_passes: int  # how often `forward` ran, for tests and statistics

    @abstractmethod
    def new_cache(self, num_blocks: int) -> KVCache:
        """Allocate a cache of `num_blocks` blocks and make it the one `forward` reads and writes.

        Raises:
            CapacityError: the memory cannot be had.
        """

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one pass; keys and values of its rows are in the cache when it returns."""

    @abstractmethod
    def embed(self, token_ids: IntArray) -> FloatArray:
        """Embedding rows [T, E] float32 of `token_ids` [T]."""


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


def assemble(plans: Sequence[RowPlan], node_token_ids: Sequence[Sequence[int]], logits_nodes: Sequence[Sequence[int]]) -> ForwardBatch:
    """Lay the rows of several plans into one pass.

    Args:
        plans: what each sequence runs.
        node_token_ids: per plan, the token of each node.
        logits_nodes: per plan, the nodes whose logits are wanted; their logits come in this order.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    ranges: list[RowRange] = []
    logits_rows: list[int] = []
    for plan, tokens, wanted in zip(plans, node_token_ids, logits_nodes, strict=True):
        base = len(token_ids)
        token_ids.extend(tokens[node] for node in plan.row_nodes)
        positions.extend(plan.row_positions)
        for path in plan.paths:
            table, start = np.asarray(path.block_table, np.int32), base + path.first_row
            ranges.append(RowRange(start, path.num_rows, plan.committed_len, table, path.mask, 0, plan.sequence_id, path.first_row))
        logits_rows.extend(base + plan.row_of_node[node] for node in wanted)
    return ForwardBatch(np.asarray(token_ids, np.int32), np.asarray(positions, np.int32), tuple(ranges), np.asarray(logits_rows, np.int32))
