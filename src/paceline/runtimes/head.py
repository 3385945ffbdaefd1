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
from paceline.models.config import ModelConfig
from paceline.models.weights import Weights
from paceline.runtimes.base import FloatArray, ForwardBatch
from paceline.runtimes.decoder import Blocks
from paceline.runtimes.native.library import kernels_path
from paceline.runtimes.native.records import Draw

Value = TypeVar("Value")

DRAW = np.dtype(Draw)
"""How the token of a row is drawn: `key` of its noise (`sampling/noise.py`), and `temperature`; 0 = it is not drawn."""

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
