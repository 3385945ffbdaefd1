"""Top-k, top-p and min-p: which ids of a scored row may be drawn.

The outcome is defined on the row sorted by (score descending, id ascending), but a sort of the whole row is the last resort:
a threshold selects the best ids first, and is widened only where their mass is short of what top-p asks for.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]
Ids = NDArray[np.int64]

_FEW, _MANY = 256, 4096  # ids that a first and, in long rows, a second selection reckon with
_LONG_ROW = 65536  # from here on a second selection is cheaper than sorting everything
_LOWEST = np.finfo(np.float32).min


def restrict(scores: Scores, peak: np.float32, *, top_k: int, top_p: float, min_p: float) -> Ids | None:
    """The ids that survive top-k, then top-p of what that left, then min-p.

    Args:
        scores: [V] log-probabilities up to a constant.
        peak: their maximum, finite.
        top_k: keep scores not below the k-th best, ties included; 0 = off.
        top_p: keep ids in order of score, lowest id first on ties, while the mass before them is below `top_p` of the whole; 1 = off.
        min_p: keep ids with exp(score - peak) >= min_p; 0 = off.

    Returns:
        ids, ascending, at least one; None = all V.

    Source: Holtzman et al. 2019 (arXiv:1904.09751) section 3.1 for top-p; Nguyen et al. 2024 (arXiv:2407.01082) for min-p.
    """
    ids: Ids | None = None
    if 0 < top_k < len(scores):
        kth = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
        ids = np.flatnonzero(scores >= max(kth, _LOWEST))
    if top_p == 1.0 and min_p == 0.0:
        return ids
    left = scores if ids is None else scores[ids]
    if top_p < 1.0:
        kept = _nucleus(left, float(_weights(left, peak).sum()), peak, top_p)
        ids = kept if ids is None else ids[kept]
        left = scores[ids]
    if min_p > 0.0:
        kept = np.flatnonzero(_weights(left, peak) >= np.float32(min_p))
        ids = kept if ids is None else ids[kept]
    return ids


def _nucleus(scores: Scores, total: float, peak: np.float32, top_p: float) -> Ids:
    """Positions, ascending, of the best scores that together hold `top_p` of the `total` weight."""
    wanted = top_p * total
    for chosen in _selections(scores, peak, total - wanted):
        falling = np.sort(scores if chosen is None else scores[chosen])[::-1]
        mass = np.cumsum(_weights(falling, peak), dtype=np.float64)  # sequential: equal for equal prefixes, however many follow
        if mass[-1] >= wanted:
            break
    # Rank r stays where the mass before it is short; behind the whole row there is nothing to add.
    num_kept = min(int(np.searchsorted(mass, wanted)) + 1, len(falling))
    cut = falling[num_kept - 1]
    # The best scores, whichever set they were found in: everything from the cut on.
    kept: Ids = np.flatnonzero(scores >= cut) if chosen is None else chosen[scores[chosen] >= cut]
    surplus = len(kept) - num_kept
    return _drop_last_ties(kept, scores[kept] == cut, surplus) if surplus else kept


def _selections(scores: Scores, peak: np.float32, spare: float) -> Iterator[Ids | None]:
    """The best positions that hold all but the `spare` weight of a peaked row, then the whole row (None)."""
    for count in (_FEW, _MANY) if len(scores) > _LONG_ROW else (_FEW,):
        # Ids that weigh less than this cannot make up the spare weight unless there are more than `count` of them.
        least = min(math.log(spare / count), 0.0) if spare > 0.0 else -math.inf
        yield np.flatnonzero(scores >= peak + np.float32(least))
    yield None


def _weights(scores: Scores, peak: np.float32) -> Scores:
    weights = scores - peak
    np.exp(weights, out=weights)
    return weights


def _drop_last_ties(kept: Ids, tied: NDArray[np.bool_], surplus: int) -> Ids:
    """Without the `surplus` highest ids among those tied at the cut."""
    return np.delete(kept, np.flatnonzero(tied)[-surplus:])
