"""Small networks that guess from a target's activations: composed from the blocks of `runtimes/decoder.py`, one call a pass.

A head is given rows of numbers (features, embeddings) instead of token ids, returns what its composition names, and keeps keys and
values in a cache of the usual form where it has attention.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.errors import BackendUnavailableError
from paceline.kv_cache.key_values import PagedRows
from paceline.kv_cache.row_plan import TreeLayout
from paceline.models.config import ModelConfig
from paceline.models.weights import AnyTensor, Weights
from paceline.runtimes.base import FloatArray, ForwardBatch
from paceline.runtimes.decoder import Blocks
from paceline.runtimes.native.library import kernels_path

Value = TypeVar("Value")

DRAW = np.dtype([("key", np.uint64), ("temperature", np.float32), ("unused", np.int32)])
"""How the token of a row is drawn: the key of its noise (`sampling/noise.py`), and what logits are divided by; 0 = it is not drawn."""

Draws: TypeAlias = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Ranking:
    """What is wanted of rows of logits: a few numbers, so that the rows need not be looked at again.

    Attributes:
        columns: of a row, the first ones that count.
        count: so many of the best.
        target_ids: [columns] the id that each stands for; None = its own number.
    """

    columns: int
    count: int
    target_ids: NDArray[np.int64] | None = None


class RankedRow(NamedTuple):
    """What was found in one row, its logits divided by the temperature where it was drawn from.

    Attributes:
        log_sum: log(sum(exp(score))); not finite where the row holds NaN or +inf, or nothing else than -inf.
        drawn: the id with the largest score - log E of noise E; -1 where nothing was drawn.
        scores, token_ids: the best, largest first, lower columns first on ties; -inf and -1 where the row has no more.
    """

    log_sum: float
    drawn: int
    scores: Sequence[float]
    token_ids: Sequence[int]


def ranked_rows(records: FloatArray) -> list[RankedRow]:
    """What `HeadBlocks.rank` found.

    Args:
        records: [R, 2 + 2 * count] float32: `log_sum`, `drawn`, `scores`, `token_ids`; ids are the bits of an int32.
    """
    end = (records.shape[1] + 2) // 2
    numbers = zip(records.tolist(), records.view(np.int32).tolist(), strict=True)
    return [RankedRow(floats[0], ints[1], floats[2:end], ints[end:]) for floats, ints in numbers]


class GrowerNames(NamedTuple):
    """A network's inputs, of which `feature` is a result as well, and the result with the records of its rows.

    Attributes:
        true_features: the inputs that take the target's features in the network of true pairs, side by side.
    """

    embedding: str
    feature: str
    ranked: str
    true_features: Sequence[str]


class Grower(Protocol):
    """Grows whole drafts of one request whose rows nothing but the temperature changes, all passes in one call.

    Attributes:
        most_true: pairs with the target's features that it takes at once.
    """

    most_true: int

    def grow(
        self,
        token_ids: Sequence[int],
        features: Sequence[FloatArray],
        block_table: Sequence[int],
        *,
        base: int,
        first_slot: int,
        width: int,
        depth: int,
        row_budget: int,
        max_depth: int,
        layout: TreeLayout,
        seed: int,
        sample_index: int,
        temperature: float,
    ) -> list[int]:
        """What `drafters/pairs` guesses pass by pass and `speculation/tree_growth.py` chooses among.

        Args:
            token_ids, features: of the true pairs, the root's last; features [T, F] in parts.
            block_table, first_slot: where rows stand, the drafted ones included, and what they see.
            base: slots of the true pairs, the root's included.
            width: nodes of a level that are expanded, and guesses behind each; 1 = a chain.
            depth: levels to guess.
            row_budget, max_depth, layout: of the tree.
            seed, sample_index, temperature: of the draws; 0 = greedy.

        Returns:
            the number of nodes N and the token of each, that of the root being -1; of a tree also N parents and N depths, breadth-first.
            More may follow.
        """
        ...


class HeadsGrower(Protocol):
    """Grows the tree of heads that read one feature, for one request whose rows nothing but the temperature changes.

    Attributes:
        num_ranks: ids there are of each depth.
    """

    num_ranks: int

    def grow(
        self,
        feature: FloatArray,
        least: Sequence[float],
        *,
        ranks: int,
        position: int,
        row_budget: int,
        layout: TreeLayout,
        seed: int,
        sample_index: int,
        temperature: float,
    ) -> tuple[list[int], list[int]]:
        """What `drafters/medusa` guesses, as deep as there are heads.

        Args:
            feature: [E].
            least: by depth, how likely a drawn guess is at least; none where nothing is drawn.
            ranks: guesses at a depth.
            position: of the first token to guess.
            row_budget, layout: of the tree.
            seed, sample_index, temperature: of the draws; 0 = greedy.

        Returns:
            the tree, see `Grower`, and the ids guessed at each depth that was of use, `num_ranks` each, -1 where there are no more.
        """
        ...


class HeadBlocks(Blocks[Value], Protocol[Value]):
    """What heads are made of besides the blocks of a decoder."""

    def input(self, name: str, width: int) -> Value:
        """Rows [T, width] that `forward` is given by this name; the same value whenever it is asked for."""
        ...

    def concat(self, *values: Value) -> Value:
        """The values side by side, [T, sum of widths]."""
        ...

    def silu_residual(self, x: Value, y: Value) -> Value:
        """x + silu(y)."""
        ...

    def rank(self, logits: Value, ranking: Ranking) -> Value:
        """The records of rows of logits, [R, 2 + 2 * count], for `ranked_rows`."""
        ...


class Compose(Protocol):
    """A network: its results by name, [T, width], or [R, width] behind `logits_rows`."""

    def __call__(self, blocks: HeadBlocks[Value]) -> Mapping[str, Value]: ...


class HeadRuntime(ABC):
    """A loaded head. Not thread-safe: one caller, one pass at a time."""

    config: ModelConfig
    compose: Compose
    num_passes: int  # how often `forward` ran, here and in the networks beside it

    @abstractmethod
    def forward(self, inputs: Mapping[str, FloatArray], batch: ForwardBatch, draws: Draws | None = None) -> Mapping[str, FloatArray]:
        """Run one pass; keys and values of its rows are in the cache when it returns.

        Args:
            inputs: [T, width] by the names the network asks for.
            batch: positions and ranges of the rows, and those whose logits are wanted; its token ids are not read. A network
                without attention needs no ranges.
            draws: [rankings, R] `DRAW`, in the order in which the network ranks; None = nothing is drawn.

        Returns:
            float32 results by name, views that the next pass overwrites.
        """

    @abstractmethod
    def new_cache(self, num_blocks: int) -> PagedRows:
        """Allocate keys and values of `num_blocks` blocks, those that this network and those beside it read and write from now on.

        Raises:
            CapacityError: the memory cannot be had.
        """

    def grower(self, drafted: "HeadRuntime", embedding: AnyTensor, names: GrowerNames) -> Grower | None:
        """Who grows drafts with this network of true pairs and that of drafted ones; None where that cannot be done in one call."""
        return None

    def heads_grower(self, feature: str, heads: Sequence[str], lm_head: "tuple[HeadRuntime, str, str] | None") -> HeadsGrower | None:
        """Who grows trees with this network of heads; None where that cannot be done in one call.

        Args:
            feature: its input.
            heads: its results: the records of each head's row, or what `lm_head` takes.
            lm_head: the network that ranks the rows of all heads, its input and its result; None = each has its own.
        """
        return None

    @abstractmethod
    def beside(self, compose: Compose) -> "HeadRuntime":
        """Another network of the same weights and the same cache."""


def open_head(
    compose: Compose,
    config: ModelConfig,
    weights: Weights,
    *,
    num_threads: int,
    max_context: int,
    backend: str = "auto",
    device: str = "cpu",
) -> HeadRuntime:
    """A head that is ready to run, computed in float32 from the weights as they are stored.

    Args:
        compose: the network.
        config: sizes of its attention and MLP; the blocks read nothing else of it.
        weights: under the names `compose` uses, with `.weight` or `.bias`.
        max_context: positions to prepare for.
        backend: "native", "torch" or "auto": native where there are kernels and the device is no GPU.
        device: of the torch runtime, "cpu" or "cuda".

    Raises:
        BackendUnavailableError: the backend is not one of these, or cannot run here.
    """
    if backend == "auto":
        backend = "native" if device != "cuda" and kernels_path() is not None else "torch"
    if backend == "native":
        from paceline.runtimes.native.head import NativeHead

        return NativeHead(compose, config, weights, num_threads=num_threads, max_context=max_context)
    if backend == "torch":
        from paceline.runtimes.torch.head import TorchHead

        return TorchHead(compose, config, weights, device=device)
    raise BackendUnavailableError(f"heads run on 'native' or 'torch', not on {backend!r}: use one of these, or 'auto'")
