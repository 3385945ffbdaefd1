"""Drawing from what is known of a row's best few tokens: exact wherever top-k, top-p and min-p keep no others. For guesses alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.sampling.noise import Purpose, exponential, noise_bits
from paceline.sampling.params import SamplingParams

FEW = 8
"""As many of a row's best tokens are looked at."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What top-k, top-p and min-p keep of the best few.

    Attributes:
        count: the first so many of them, surely.
        share: of the row's whole mass that these hold.
        is_all: whether nothing else of the row is kept.
    """

    count: int
    share: float
    is_all: bool


def kept_of_few(params: SamplingParams, probs: Sequence[float]) -> Kept:
    """What is kept of a row.

    Args:
        probs: of its best few tokens, largest first.
    """
    few = probs[: params.top_k] if params.top_k else probs
    most = sum(few) if 0 < params.top_k <= len(probs) else 1.0  # what top-k leaves, of which top-p keeps a share, is at most
    least = sum(few) if params.top_k else 1.0
    share = 0.0
    for count, prob in enumerate(few):
        if count and (prob < params.min_p * probs[0] or share >= params.top_p * most):
            return Kept(count, share, is_all=True)
        if count and share >= params.top_p * least:
            return Kept(count, share, is_all=False)
        share += prob
    return Kept(len(few), share, is_all=len(few) == params.top_k or share >= params.top_p * most)


def redraw(token_ids: Sequence[int], scores: Sequence[float], seed: int, sample_index: int, position: int) -> int:
    """The token that noise draws at a position, were these the only ones.

    Args:
        scores: log-probabilities up to a constant, divided by the temperature.
    """
    bits = noise_bits(seed, sample_index, position, Purpose.TOKEN, np.array(token_ids))
    return token_ids[int((np.array(scores) - np.log(exponential(bits))).argmax())]
