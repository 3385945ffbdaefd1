"""Sampling along whole draft trees by compiled code, for all requests of a step at once.

A sampler draws the tokens that `LogitsProcessor.process` and `draw` define, bit for bit, from rows that nothing edits.
It returns None for a tree with a row that it cannot decide; such a tree is sampled row by row.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]


class SampledPath(NamedTuple):
    """The path that the target's own tokens take through a tree.

    Attributes:
        token_ids: one for each of `nodes`, then the token that no node holds.
        nodes: from the root's child down.
    """

    token_ids: Sequence[int]
    nodes: Sequence[int]


class ForwardLogits(Protocol):
    """The part of a forward pass's output that is sampled from."""

    @property
    def logits(self) -> Rows: ...
    @property
    def block_max(self) -> Rows | None: ...
    @property
    def logits_at(self) -> int: ...
    @property
    def block_max_at(self) -> int: ...


class LogitsView(NamedTuple):
    """Rows to sample from.

    Attributes:
        logits: [R, V].
        block_max: [R, blocks] the largest logit of each block of a row, as the runtime computes it; None = unknown.
        logits_at, block_max_at: addresses of both; 0 = read from the arrays, which takes longer.
    """

    logits: Rows
    block_max: Rows | None = None
    logits_at: int = 0
    block_max_at: int = 0

    @classmethod
    def of(cls, output: ForwardLogits, vocab_size: int) -> "LogitsView":
        """View the rows of a forward pass without padding ids."""
        return cls(output.logits[:, :vocab_size], output.block_max, output.logits_at, output.block_max_at)


class PathSampler(Protocol):
    """The sampling parameters of one request, compiled."""

    @property
    def batch(self) -> "BatchPathSampler":
        """The sampler that takes this request, and others with the same one, in one call."""


class PathRequest(NamedTuple):
    """One tree to sample along.

    Attributes:
        token_ids, parents: [N] of the tree.
        seed, sample_index, position: of the token after the root, as `draw` takes them.
        first_row: of the root; node i has row `first_row + i`.
    """

    sampler: PathSampler
    token_ids: Sequence[int]
    parents: Sequence[int]
    seed: int
    sample_index: int
    position: int
    first_row: int = 0


class BatchPathSampler(Protocol):
    """Samples for several requests at once."""

    def sample(self, requests: Sequence[PathRequest], rows: LogitsView) -> list[SampledPath | None]:
        """Sample each request's path, in order; None where a row must be left to the definition."""


def sample_paths(requests: Sequence[PathRequest | None], rows: LogitsView) -> list[SampledPath | None]:
    """Sample the paths of a step's requests, in one call for all that share a batch sampler; None stays None."""
    paths: list[SampledPath | None] = [None] * len(requests)
    groups: dict[BatchPathSampler, list[tuple[int, PathRequest]]] = {}
    for index, request in enumerate(requests):
        if request is not None:
            groups.setdefault(request.sampler.batch, []).append((index, request))
    for batch, group in groups.items():
        for (index, _), path in zip(group, batch.sample([request for _, request in group], rows), strict=True):
            paths[index] = path
    return paths


def sample_row(sampler: PathSampler, row: Rows, seed: int, sample_index: int, position: int) -> int | None:
    """Sample the token of one row [V]; None where the row must be left to the definition."""
    [path] = sampler.batch.sample([PathRequest(sampler, (0,), (-1,), seed, sample_index, position)], LogitsView(row[None]))
    return None if path is None else path.token_ids[0]
