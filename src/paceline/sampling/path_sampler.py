"""Interface of the compiled sampler, a C kernel, which samples the draft trees of all requests of a step in one call.

It samples exactly the tokens that `LogitsProcessor.process` and `draw` define, for requests whose logits are changed only by temperature,
top-k, top-p and min-p. It sums in float32. If rounding could change the result, it returns None for the whole tree, which is then sampled
row by row with those functions.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

LogitsArray = NDArray[np.float32]


class SampledPath(NamedTuple):
    """The tokens that are sampled along one path of a draft tree, until no child holds the sampled token."""

    token_ids: Sequence[int]  # token of each of `nodes`, then the token after the last node
    nodes: Sequence[int]  # nodes of the path, from depth 1 down


class LogitsView(NamedTuple):
    """The logits of a forward pass."""

    logits: LogitsArray  # [R, V]
    block_max: LogitsArray | None = None  # [R, blocks] maximum of every `BLOCK_COLUMNS` adjacent logits of a row; None = not computed


class PathSampler(Protocol):
    """Sampling parameters of one request, in the form that the compiled sampler reads."""

    @property
    def batch_sampler(self) -> "BatchPathSampler":
        """The sampler that samples several requests of this model in one call."""


class PathRequest(NamedTuple):
    """One draft tree to sample, with its request's parameters and random seed."""

    sampler: PathSampler  # compiled sampling parameters of the request
    token_ids: Sequence[int]  # [N] tokens and parents as in `DraftTree`
    parents: Sequence[int]
    seed: int  # seed, sample index and position: arguments of `draw` for the token after the root
    sample_index: int
    position: int
    first_row: int = 0  # the root's row; node i has row `first_row + i`


class BatchPathSampler(Protocol):
    """Samples the draft trees of several requests of one model in one call."""

    def sample(self, requests: Sequence[PathRequest], logits_view: LogitsView) -> list[SampledPath | None]:
        """Return the sampled path of each request, in order; a path is None if rounding could change it."""


def sample_paths(requests: Sequence[PathRequest | None], logits_view: LogitsView) -> list[SampledPath | None]:
    """Sample the trees of a step's requests in one call. The result is None for a request that is None."""
    present = [request for request in requests if request is not None]
    if not present:
        return [None] * len(requests)
    paths = iter(present[0].sampler.batch_sampler.sample(present, logits_view))
    return [None if request is None else next(paths) for request in requests]


def sample_row(sampler: PathSampler, row: LogitsArray, seed: int, sample_index: int, position: int) -> int | None:
    """Sample the token of one row [V]; None if rounding could change the result."""
    [path] = sampler.batch_sampler.sample([PathRequest(sampler, (0,), (-1,), seed, sample_index, position)], LogitsView(row[None]))
    return None if path is None else path.token_ids[0]
