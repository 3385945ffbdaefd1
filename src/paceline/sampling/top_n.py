"""The most probable tokens of a row, and what they reveal of its truncation: enough for drafts and for listing log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.draw import Distribution, ScoreArray, draw
from paceline.sampling.params import SamplingParams

TOP_N = 8
"""Tokens that are examined to find a row's support: exact wherever top-k, top-p and min-p keep no others."""

_BLOCKS_A_TOKEN, _MIN_BLOCKS = 16, 128  # more blocks make the bound tighter, fewer make it cheaper


def top_n(scores: ScoreArray, count: int) -> NDArray[np.intp]:
    """Find the positions of the `count` largest scores above -inf, largest first, lowest position first on ties.

    At least `count` scores reach the count-th largest maximum of disjoint blocks, so only what reaches it is sorted.
    """
    if count == 0:
        return np.empty(0, np.intp)
    num_blocks = max(_BLOCKS_A_TOKEN * count, _MIN_BLOCKS)
    bound = np.float32(-np.inf)
    if len(scores) >= 2 * num_blocks:
        whole = len(scores) - len(scores) % num_blocks
        bound = np.partition(scores[:whole].reshape(-1, num_blocks).max(axis=0), -count)[-count]
    reaching = np.flatnonzero(scores >= bound)
    best = reaching[np.argsort(-scores[reaching], kind="stable")[:count]]
    return best[scores[best] > -np.inf]


def top_probs(params: SamplingParams, scores: ScoreArray, count: int) -> tuple[NDArray[np.intp], list[float]]:
    """Find up to `count` of the most probable tokens that truncation leaves, and estimate their probabilities after it.

    Args:
        scores: [M] logits after the temperature and before truncation.

    Returns:
        positions as of `top_n`, and their probabilities.
    """
    truncates = not params.is_greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
    best = top_n(scores, max(count, TOP_N) if truncates else count)
    peak = scores[best[0]]
    probs: list[float] = (np.exp(scores[best] - peak) / np.exp(scores - peak).sum()).tolist()
    if truncates:
        support = support_of(params, probs)
        kept = min(count, support.count)
        best, probs = best[:kept], [prob / support.share if support.is_all else prob for prob in probs[:kept]]
    return best, probs


@dataclass(frozen=True, slots=True)
class Support:
    """What top-k, top-p and min-p keep of the top tokens.

    Attributes:
        count: at least the first `count` of them are kept.
        share: the probability that these hold before truncation.
        is_all: whether no other token of the row is kept.
    """

    count: int
    share: float
    is_all: bool


def support_of(params: SamplingParams, probs: Sequence[float]) -> Support:
    """Compute the support of a row.

    Args:
        probs: of its top tokens before truncation, largest first.
    """
    top = probs[: params.top_k] if params.top_k else probs
    most = sum(top) if 0 < params.top_k <= len(probs) else 1.0  # bounds of the mass that top-k leaves, of which top-p keeps a share
    least = sum(top) if params.top_k else 1.0
    share = 0.0
    for count, prob in enumerate(top):
        if count and (prob < params.min_p * probs[0] or share >= params.top_p * most):
            return Support(count, share, is_all=True)
        if count and share >= params.top_p * least:
            return Support(count, share, is_all=False)
        share += prob
    return Support(len(top), share, is_all=len(top) == params.top_k or share >= params.top_p * most)


def draw_of_top(token_ids: Sequence[int], scores: Sequence[float], seed: int, sample_index: int, position: int) -> int:
    """Draw the token of a position as if these were the only ones.

    Args:
        token_ids: in any order.
        scores: log-probabilities up to a constant, divided by the temperature.
    """
    return draw(Distribution(np.array(scores, np.float32), np.array(token_ids), greedy=False), seed, sample_index, position)
