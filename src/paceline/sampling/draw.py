"""The draw: a distribution and the noise of a position give the token."""

import math

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.noise import BitsArray, IdArray, Purpose, bits_by_run, exponential, noise_bits, noise_key
from paceline.sampling.processors import Distribution, ScoreArray
from paceline.sampling.restrict import Nucleus

_WIDE_ROW = 2048  # from here on bounding first is cheaper than float64 logarithms of the whole row
_LOG_RANGE = 32.0 * math.log(2.0)  # of w = (bits + 1/2) / 2**32
_NUM_RIVALS = 8.0  # nucleus ids looked at on average; none at all with probability exp(-8)
_MAX_REACH = 32.0  # of E / weight: above any E, so the best score, which weighs 1, is always within
_WIDER = 32.0
_RIVAL_SLACK = 1.0 + 2.0**-8  # float32 weights within reach err by less than 1e-5


def draw(distribution: Distribution, seed: int, sample_index: int, position: int) -> int:
    """The token of one position: argmax_v (score_v - log E_v), or the plain argmax of a greedy distribution.

    Args:
        distribution: what is left of the row after the processors.
        seed: the request's, in [0, 2**64).
        sample_index: which of the request's n samples.
        position: index in prompt + output of the token being drawn.

    Returns:
        a vocabulary id; a pure function of the arguments, lowest id on ties.
    """
    if distribution.greedy:
        return distribution.argmax()
    ids = distribution.token_ids
    scores = distribution.scores
    if distribution.nucleus is not None:
        key = noise_key(int(seed), int(sample_index), int(position), Purpose.TOKEN)
        best = _best_of_nucleus(distribution.nucleus, key, ids)
        return best if ids is None else int(ids[best])
    bits = noise_bits(seed, sample_index, position, Purpose.TOKEN, len(scores) if ids is None else ids)
    best = _best_of_row(scores, bits)
    return best if ids is None else int(ids[best])


def _race(scores: ScoreArray, bits: BitsArray) -> NDArray[np.float64]:
    """score - log E in float64: the values whose argmax is the token."""
    return np.asarray(scores - np.log(exponential(bits)), np.float64)


def _best_of_row(scores: ScoreArray, bits: BitsArray) -> int:
    """Index of the largest `_race` value, the first one on ties, without computing float64 logarithms of a wide row.

    E = -log1p(-w) >= w, so score - log w bounds a race value from above, and bounds it closely where noise is large.
    """
    if len(scores) < _WIDE_ROW:
        return int(np.argmax(_race(scores, bits)))
    bounds = bits.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):  # zero bits: a bound of +inf, or NaN where the score is -inf
        np.log(bounds, out=bounds)
        np.subtract(scores, bounds, out=bounds)  # short of the constant 32 log 2, which the floor makes up for
    leader = int(np.argmax(bounds))  # a NaN if there is one: then the floor is -inf and every score above -inf a candidate
    reached = float(_race(scores[leader : leader + 1], bits[leader : leader + 1])[0]) - _LOG_RANGE
    # A computed bound u is off by at most |u| 2**-23 (the difference) + 2e-5 (float32 logarithm, <= 4 ulp of 22.2, of a
    # float32 argument): an id whose bound is below this floor cannot reach the leader's value.
    floor = reached - abs(reached) * 2.0**-20 - 1e-3
    candidates = np.flatnonzero(bounds >= np.float32(floor))
    return int(candidates[np.argmax(_race(scores[candidates], bits[candidates]))])


def _best_of_nucleus(nucleus: Nucleus, key: int, token_ids: IdArray | None) -> int:
    """Position of the largest `_race` value in the nucleus, the first one on ties: what listing it first would give.

    Ids are tried by race value, best first; the first one that the nucleus keeps is the token.
    """
    reach = min(_NUM_RIVALS / nucleus.wanted, _MAX_REACH)
    while True:
        best = _best_rival(nucleus, reach, key, token_ids)
        if best is not None:
            return best
        # This ends: with the largest reach the best score is a rival, and every nucleus keeps it.
        reach = min(reach * _WIDER, _MAX_REACH)


def _best_rival(nucleus: Nucleus, reach: float, key: int, token_ids: IdArray | None) -> int | None:
    """The nucleus's best, or None where E / weight of all it keeps is above `reach`."""
    rivals, bits = _rivals(nucleus, reach, key, token_ids)
    races = _race(nucleus.scores[rivals], bits)
    floor = float(nucleus.peak) - math.log(reach)  # ids that are no rivals are below it
    refused = (math.inf, 0)
    while len(races):
        index = int(races.argmax())
        if races[index] < floor:
            return None
        races[index] = -math.inf
        rival = int(rivals[index])
        rank = (-float(nucleus.scores[rival]), rival)
        if rank < refused:
            if nucleus.keeps(rival):
                return rival
            refused = rank  # and so are all that rank behind it
    return None


def _rivals(nucleus: Nucleus, reach: float, key: int, token_ids: IdArray | None) -> tuple[NDArray[np.int64], BitsArray]:
    """Positions, ascending, that min-p keeps and whose E / weight may be up to `reach`, and their bits. E >= w bounds it from below."""
    weights = nucleus.weights
    most_bits = np.float32(reach * _RIVAL_SLACK * 2.0**32)  # of an id that weighs 1
    found, found_bits = [], []
    for first, bits in bits_by_run(key, len(weights) if token_ids is None else token_ids):
        (hits,) = (bits.astype(np.float32) <= weights[first : first + len(bits)] * most_bits).nonzero()
        found.append(hits + first)
        found_bits.append(bits[hits])
    rivals, rival_bits = (found[0], found_bits[0]) if len(found) == 1 else (np.concatenate(found), np.concatenate(found_bits))
    if nucleus.min_p == 0.0:
        return rivals, rival_bits
    heavy = weights[rivals] >= np.float32(nucleus.min_p)
    return rivals[heavy], rival_bits[heavy]
