"""Top-k, top-p and min-p: which ids of a scored row may be drawn.

With weights w = exp(score - largest score), top-p keeps an id while the weight before it is below top_p * sum(w), in the order
(score descending, id ascending).
"""

import math

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]
Ids = NDArray[np.int64]


def truncate(scores: Scores, peak: np.float32, *, top_k: int, top_p: float, min_p: float) -> Ids | None:
    """List the ids that survive top-k, then top-p of what that left, then min-p.

    Args:
        scores: [V] log-probabilities up to a constant.
        peak: their maximum, finite.
        top_k: keep scores not below the k-th best, ties included; 0 = off.
        top_p: keep ids while the weight before them is below `top_p` of the whole; 1 = off.
        min_p: keep ids with exp(score - peak) >= min_p; 0 = off.

    Returns:
        ids, ascending, at least one; None = all V.

    Source: Holtzman et al. 2019 (arXiv:1904.09751) section 3.1 for top-p; Nguyen et al. 2024 (arXiv:2407.01082) for min-p.
    """
    ids: Ids | None = None
    if 0 < top_k < len(scores):
        finite = scores[scores > -np.inf]  # partition takes 20 times as long on a row that is mostly -inf
        ids = np.flatnonzero(scores >= (np.partition(finite, -top_k)[-top_k] if top_k < len(finite) else finite.min()))
        scores = scores[ids]
    if top_p == 1.0 and min_p == 0.0:
        return ids
    weights = np.exp(scores - peak)
    if top_p < 1.0:
        kept = _top_p(scores, weights, peak, top_p)
        kept = kept[weights[kept] >= np.float32(min_p)]
    else:
        kept = np.flatnonzero(weights >= np.float32(min_p))
    return kept if ids is None else ids[kept]


def _top_p(scores: Scores, weights: Scores, peak: np.float32, top_p: float) -> Ids:
    """List the positions that top-p keeps, ascending."""
    total = float(weights.sum())
    floor = float(peak) + math.log((1.0 - top_p) * total / len(scores))  # all below it together weigh less than what top-p drops
    for candidates in (scores[scores >= floor], scores):  # rounding may need the whole row
        falling = np.sort(candidates)[::-1]
        mass = np.cumsum(np.exp(falling - peak), dtype=np.float64)
        if len(mass) and mass[-1] >= top_p * total:
            break
    count = min(int(np.searchsorted(mass, top_p * total)) + 1, len(scores))
    kept = np.flatnonzero(scores >= falling[count - 1])
    tied = np.flatnonzero(scores[kept] == falling[count - 1])
    return np.delete(kept, tied[len(tied) - (len(kept) - count) :])
