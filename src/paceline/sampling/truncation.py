"""Top-k, top-p and min-p: which tokens of a row can be sampled.

`truncate` is the definition, for a whole row. `support_of` needs only the most probable tokens, and returns how many of them are kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.draw import ScoreArray
from paceline.sampling.params import SamplingParams

SUPPORT_TOP_N = 8
"""Number of most probable tokens from which a row's support is computed."""

_SCORE_BLOCKS_PER_RESULT, _MIN_SCORE_BLOCKS = 16, 128  # more blocks make the bound of `top_n` tighter, fewer make it cheaper


def truncate(scores: ScoreArray, max_score: np.float32, *, top_k: int, top_p: float, min_p: float) -> NDArray[np.int64] | None:
    """Return the ids that are kept by top-k, then by top-p among these, then by min-p.

    The weight of an id is w = exp(score - max_score). In the order (score descending, id ascending), top-p keeps an id if the weights of
    all ids before it sum to less than top_p * sum(w).

    Args:
        scores: [V] log-probabilities up to a constant.
        max_score: the maximum of `scores`, finite.
        top_k: number of ids to keep, more if others tie with the last one; 0 = off.
        top_p: share of the total weight to keep; 1 = off.
        min_p: minimum weight of an id; 0 = off.

    Returns:
        ids, ascending, at least one; None = all V.

    Source: Holtzman et al. 2019 (arXiv:1904.09751) section 3.1 for top-p; Nguyen et al. 2024 (arXiv:2407.01082) for min-p.
    """
    ids: NDArray[np.int64] | None = None
    if 0 < top_k < len(scores):
        finite = scores[scores > -np.inf]  # np.partition takes 20 times as long on a row that is mostly -inf
        ids = np.flatnonzero(scores >= (np.partition(finite, -top_k)[-top_k] if top_k < len(finite) else finite.min()))
        scores = scores[ids]
    if top_p == 1.0 and min_p == 0.0:
        return ids
    weights = np.exp(scores - max_score)
    if top_p < 1.0:
        kept = _top_p(scores, weights, max_score, top_p)
        kept = kept[weights[kept] >= np.float32(min_p)]
    else:
        kept = np.flatnonzero(weights >= np.float32(min_p))
    return kept if ids is None else ids[kept]


def _top_p(scores: ScoreArray, weights: ScoreArray, max_score: np.float32, top_p: float) -> NDArray[np.int64]:
    """Return the indices that top-p keeps, ascending."""
    total = float(weights.sum())
    # All scores below `floor` together weigh less than what top-p excludes. Unless rounding interferes, only the others need sorting.
    floor = float(max_score) + math.log((1.0 - top_p) * total / len(scores))
    for candidates in (scores[scores >= floor], scores):
        descending = np.sort(candidates)[::-1]
        mass = np.cumsum(np.exp(descending - max_score), dtype=np.float64)
        if len(mass) and mass[-1] >= top_p * total:
            break
    count = min(int(np.searchsorted(mass, top_p * total)) + 1, len(scores))
    kept = np.flatnonzero(scores >= descending[count - 1])
    tied = np.flatnonzero(scores[kept] == descending[count - 1])
    return np.delete(kept, tied[len(tied) - (len(kept) - count) :])


def top_n(scores: ScoreArray, count: int) -> NDArray[np.intp]:
    """Return the indices of the `count` largest scores above -inf, largest first, lowest index first on ties.

    Scores are divided into disjoint blocks. The count-th largest block maximum is a lower bound of the count-th largest score, so that only
    scores above it are sorted.
    """
    if count == 0:
        return np.empty(0, np.intp)
    num_blocks = max(_SCORE_BLOCKS_PER_RESULT * count, _MIN_SCORE_BLOCKS)
    bound = np.float32(-np.inf)
    if len(scores) >= 2 * num_blocks:
        num_in_blocks = len(scores) - len(scores) % num_blocks
        bound = np.partition(scores[:num_in_blocks].reshape(-1, num_blocks).max(axis=0), -count)[-count]
    candidates = np.flatnonzero(scores >= bound)
    best = candidates[np.argsort(-scores[candidates], kind="stable")[:count]]
    return best[scores[best] > -np.inf]


def top_probs(params: SamplingParams, scores: ScoreArray, count: int) -> tuple[NDArray[np.intp], list[float]]:
    """Find up to `count` of the most probable tokens that are kept by top-k, top-p and min-p, and estimate their probabilities.

    Args:
        scores: [M] logits divided by the temperature.

    Returns:
        the indices of these tokens, as from `top_n`, and their probabilities after truncation.
    """
    best = top_n(scores, max(count, SUPPORT_TOP_N) if params.has_truncation else count)
    max_score = scores[best[0]]
    probs: list[float] = (np.exp(scores[best] - max_score) / np.exp(scores - max_score).sum()).tolist()
    if params.has_truncation:
        support = support_of(params, probs)
        kept = min(count, support.num_kept)
        best, probs = best[:kept], [prob / support.mass if support.includes_all_kept else prob for prob in probs[:kept]]
    return best, probs


@dataclass(frozen=True, slots=True)
class Support:
    """Tokens of a row that top-k, top-p and min-p keep whatever the rounding; they may keep less probable tokens, too."""

    num_kept: int  # the `num_kept` most probable tokens of the row are kept
    mass: float  # sum of the probabilities of these tokens before truncation
    includes_all_kept: bool  # whether these are all tokens that truncation keeps


def support_of(params: SamplingParams, probs: Sequence[float]) -> Support:
    """Return the support of a row, given the probabilities of its most probable tokens before truncation, largest first."""
    top = probs[: params.top_k] if params.top_k else probs
    # Bounds of the probability mass that top-k keeps. It is not known exactly because of ties and of tokens that are not in `probs`.
    upper = sum(top) if 0 < params.top_k <= len(probs) else 1.0
    lower = sum(top) if params.top_k else 1.0
    mass = 0.0
    for count, prob in enumerate(top):
        if count and (prob < params.min_p * probs[0] or mass >= params.top_p * upper):
            return Support(count, mass, includes_all_kept=True)
        if count and mass >= params.top_p * lower:
            return Support(count, mass, includes_all_kept=False)
        mass += prob
    return Support(len(top), mass, includes_all_kept=len(top) == params.top_k or mass >= params.top_p * upper)
