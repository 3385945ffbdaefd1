"""Top-k, top-p and min-p: which ids of a scored row may be drawn.

The outcome is defined on the row sorted by (score descending, id ascending), but a sort of the whole row is the last resort:
a threshold selects the best ids first, and where their mass is short of what top-p asks for, a wide row is not sorted at all.
It is left as a `Nucleus`, which can be asked about one id: the mass before it is one masked sum.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]
Ids = NDArray[np.int64]

_FEW, _MANY = 256, 4096  # ids expected from a first and, in long rows, a second selection
_WIDE_ROW = 4096  # from here on asking about one id is cheaper than sorting everything
_LONG_ROW = 65536  # from here on a second selection is tried first
_MAX_SHARE = 16  # a selection of more than 1 / 16 of a wide row is not worth sorting either
_FLAT_TOTAL = 64.0  # total weight (the best has 1) from which on a selection is not worth trying
_SAMPLE_STEP = 32  # one weight in 32 is enough to tell whether a second one is
_MAX_PEAK = 2.0**20  # beyond it float64 differences of score and log noise lose more than the slack of a lazy draw
_SUM_SLACK = 2.0**-17  # more than pairwise float32 sums of a row err by, (19 + log2 V) * 2**-24 of the total at most
_RUN = 8192  # scores summed between two checks whether the answer is known
_LOWEST = np.finfo(np.float32).min


@dataclass(frozen=True, slots=True)
class Nucleus:
    """The ids of a row that top-p and min-p keep, without listing them.

    Attributes:
        scores: [M] log-probabilities up to a constant.
        weights: [M] exp(score - peak).
        peak: the largest score, finite.
        total: the sum of the weights.
        wanted: a position is held while the weight before it, in (score descending, position ascending) order, is below this.
        min_p: held positions that weigh less than this are dropped.
    """

    scores: Scores
    weights: Scores
    peak: np.float32
    total: float
    wanted: float
    min_p: float

    def keeps(self, position: int) -> bool:
        """Whether `position` is in the nucleus: what `positions` would say, nearly always without its sort."""
        weight = float(self.weights[position])
        if np.float32(weight) < np.float32(self.min_p):
            return False
        score = self.scores[position]
        slack = self.total * _SUM_SLACK
        upto = self.total  # weight of what ranks before it, of itself and of its ties
        for first in range(0, len(self.scores), _RUN):
            run = slice(first, first + _RUN)
            upto -= float((self.weights[run] * (self.scores[run] < score)).sum())
            if upto - weight + slack < self.wanted:
                return True  # even if it is the last of its ties, whatever the other runs hold
        tied = np.flatnonzero(self.scores == score)
        before = upto - weight * (len(tied) - int(np.searchsorted(tied, position)))
        if abs(before - self.wanted) > slack:
            return before < self.wanted
        kept = self.positions()
        return bool(kept[min(int(np.searchsorted(kept, position)), len(kept) - 1)] == position)

    def positions(self) -> Ids:
        """All positions in the nucleus, ascending; sorts the row."""
        return self._heavy(_first_ranks(self.scores, None, *_ranked(self.scores, self.peak), self.wanted))

    def positions_if_cheap(self) -> Ids | None:
        """`positions`, or None if that would sort a wide row, which testing single positions never needs."""
        scores, peak = self.scores, self.peak
        may_leave = len(scores) >= _WIDE_ROW and abs(peak) <= _MAX_PEAK
        # min-p leaves out what is below this, whatever the rest weighs; 1/64 is far more than an exponential rounds.
        floor = math.log(self.min_p) - 2.0**-6 if self.min_p > 0.0 else -math.inf
        spare = self.total - self.wanted
        if may_leave and self.min_p == 0.0 and self.total > _FLAT_TOTAL:
            return None
        for count in (_FEW, _MANY) if may_leave and len(scores) >= _LONG_ROW else (_FEW,):
            # Scores that weigh less than this cannot make up the spare weight unless there are more than `count` of them.
            least = min(math.log(spare / count), 0.0) if spare > 0.0 else -math.inf
            if count == _MANY and floor < least and self._seems_flat(spare):
                return None
            chosen = np.flatnonzero(scores >= peak + np.float32(max(least, floor)))
            if may_leave and len(chosen) * _MAX_SHARE > len(scores):
                return None
            falling, mass = _ranked(scores[chosen], peak)
            if mass[-1] >= self.wanted or floor >= least:
                return self._heavy(_first_ranks(scores, chosen, falling, mass, self.wanted))
        return None if may_leave else self.positions()

    def _seems_flat(self, spare: float) -> bool:
        """Whether a second selection would fail too, judged by a sample: a hint that only saves time."""
        sample = self.weights[::_SAMPLE_STEP].copy()
        light = sample < spare / _MANY
        num_heavy = len(sample) - int(np.count_nonzero(light))
        return num_heavy * _MAX_SHARE > len(sample) or _SAMPLE_STEP * float((sample * light).sum()) > spare

    def _heavy(self, kept: Ids) -> Ids:
        return kept[self.weights[kept] >= np.float32(self.min_p)] if self.min_p > 0.0 else kept


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
    ids, nucleus = restrict_lazily(scores, peak, top_k=top_k, top_p=top_p, min_p=min_p)
    if nucleus is None:
        return ids
    kept = nucleus.positions()
    return kept if ids is None else ids[kept]


def restrict_lazily(scores: Scores, peak: np.float32, *, top_k: int, top_p: float, min_p: float) -> tuple[Ids | None, Nucleus | None]:
    """`restrict`, which may leave top-p and min-p of a wide, flat row unapplied.

    Returns:
        ids, ascending, None = all V; and what is still to be left out of them (positions count in `ids`), None = nothing.
    """
    ids: Ids | None = None
    if 0 < top_k < len(scores):
        kth = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
        ids = np.flatnonzero(scores >= max(kth, _LOWEST))
    if top_p == 1.0 and min_p == 0.0:
        return ids, None
    left = scores if ids is None else scores[ids]
    weights = _weights(left, peak)
    if top_p < 1.0:
        total = float(weights.sum())
        nucleus = Nucleus(left, weights, peak, total, top_p * total, min_p)
        kept = nucleus.positions_if_cheap()
        if kept is None:
            return ids, nucleus
    else:
        kept = np.flatnonzero(weights >= np.float32(min_p))
    return (kept if ids is None else ids[kept]), None


def _ranked(scores: Scores, peak: np.float32) -> tuple[Scores, NDArray[np.float64]]:
    """Scores, best first, and the weight up to each."""
    falling = np.sort(scores)[::-1]
    return falling, np.cumsum(_weights(falling, peak), dtype=np.float64)  # sequential: equal for equal prefixes, however many follow


def _first_ranks(scores: Scores, chosen: Ids | None, falling: Scores, mass: NDArray[np.float64], wanted: float) -> Ids:
    """Positions, ascending, of the best `chosen` scores (None = all) that hold the `wanted` weight; of all if they weigh less."""
    # Rank r stays where the mass before it is short; behind the last one there is nothing to add.
    num_kept = min(int(np.searchsorted(mass, wanted)) + 1, len(falling))
    cut = falling[num_kept - 1]
    # The best scores, whichever set they were found in: everything from the cut on.
    kept: Ids = np.flatnonzero(scores >= cut) if chosen is None else chosen[scores[chosen] >= cut]
    surplus = len(kept) - num_kept
    return _drop_last_ties(kept, scores[kept] == cut, surplus) if surplus else kept


def _weights(scores: Scores, peak: np.float32) -> Scores:
    weights = scores - peak
    np.exp(weights, out=weights)
    return weights


def _drop_last_ties(kept: Ids, tied: NDArray[np.bool_], surplus: int) -> Ids:
    """Without the `surplus` highest ids among those tied at the cut."""
    return np.delete(kept, np.flatnonzero(tied)[-surplus:])
