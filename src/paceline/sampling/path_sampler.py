"""Interface of the compiled sampler: samples the draft trees of all requests of a step in one call.

It draws the tokens that `LogitsProcessor.process` and `draw` define, bit for bit, from rows that need no edit before temperature. It
returns None for a tree with a row that its float32 sums cannot decide. Such a tree is sampled row by row by the definition.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]


class SampledPath(NamedTuple):
    """The tokens that the target draws, as a path through a draft tree.

    Attributes:
        token_ids: one for each of `nodes`, then the token after the last node.
        nodes: tree nodes of the path, root excluded.
    """

    token_ids: Sequence[int]
    nodes: Sequence[int]


class LogitsView(NamedTuple):
    """The logits of a forward pass.

    Attributes:
        logits: [R, V].
        block_max: [R, blocks] the largest logit of each block of a row, if the runtime computed it.
        logits_at, block_max_at: addresses of both arrays if known, because reading them from NumPy takes microseconds; 0 = unknown.
    """

    logits: Rows
    block_max: Rows | None = None
    logits_address: int = 0
    block_max_address: int = 0


class PathSampler(Protocol):
    """The sampling parameters of one request, compiled."""

    @property
    def batch(self) -> "BatchPathSampler":
        """The batch sampler that all requests of the model share."""


class PathRequest(NamedTuple):
    """One tree to sample.

    Attributes:
        sampler: compiled sampling parameters of the request.
        token_ids, parents: [N] of the tree.
        seed, sample_index, position: arguments of `draw` for the token after the root.
        first_row: the root's row; node i has row `first_row + i`.
    """

    sampler: PathSampler
    token_ids: Sequence[int]
    parents: Sequence[int]
    seed: int
    sample_index: int
    position: int
    first_row: int = 0


class BatchPathSampler(Protocol):
    """Samples several requests of one model at once."""

    def sample(self, requests: Sequence[PathRequest], rows: LogitsView) -> list[SampledPath | None]:
        """Return each request's sampled path, in order; None for a tree that the compiled sampler cannot decide."""


def sample_paths(requests: Sequence[PathRequest | None], rows: LogitsView) -> list[SampledPath | None]:
    """Sample the trees of a step's requests in one call; a request None gives the result None."""
    given = [request for request in requests if request is not None]
    if not given:
        return [None] * len(requests)
    paths = iter(given[0].sampler.batch.sample(given, rows))
    return [None if request is None else next(paths) for request in requests]


def sample_row(sampler: PathSampler, row: Rows, seed: int, sample_index: int, position: int) -> int | None:
    """Sample the token of one row [V]; None if the compiled sampler cannot decide it."""
    [path] = sampler.batch.sample([PathRequest(sampler, (0,), (-1,), seed, sample_index, position)], LogitsView(row[None]))
    return None if path is None else path.token_ids[0]
