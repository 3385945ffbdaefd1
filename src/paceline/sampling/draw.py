"""The draw: a distribution and the noise of a position give the token."""

import math

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.noise import BitsArray, IdArray, KeyArray, Purpose, exponential, key_bits, noise_bits, noise_key
from paceline.sampling.processors import Distribution, ScoreArray

_WIDE_ROW = 2048  # from here on bounding first is cheaper than float64 logarithms of the whole row
_LOG_RANGE = 32.0 * math.log(2.0)  # of w = (bits + 1/2) / 2**32


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
    bits = noise_bits(seed, sample_index, position, Purpose.TOKEN, len(scores) if ids is None else ids)
    best = _best_of_row(scores, bits)
    return best if ids is None else int(ids[best])


def draw_rows(
    scores: ScoreArray,
    token_ids: IdArray | None,
    seeds: NDArray[np.uint64],
    sample_indices: IdArray,
    positions: IdArray,
) -> NDArray[np.int64]:
    """`draw` for B rows at once, bit-equal to it (a test holds it so).

    Args:
        scores: [B, M] float32; shorter rows are padded with -inf.
        token_ids: [B, M] ids, ascending in each row (padding: any id); None = all V ids in order, M = V.
        seeds: [B] uint64.
        sample_indices: [B].
        positions: [B].

    Returns:
        [B] int64 vocabulary ids.
    """
    keys = noise_key(seeds.astype(np.uint64), sample_indices.astype(np.uint64), positions.astype(np.uint64), Purpose.TOKEN)
    num_rows, width = scores.shape
    best = np.empty(num_rows, np.int64)
    # Blocks of rows keep the working set in cache; a wide row is a block of its own.
    block = max(1, _WIDE_ROW * 32 // width)
    for start in range(0, num_rows, block):
        rows = slice(start, start + block)
        ids = width if token_ids is None else token_ids[rows]
        best[rows] = _best_of_block(scores[rows], keys[rows, None], ids)
    if token_ids is None:
        return best
    return token_ids[np.arange(num_rows), best].astype(np.int64)


def _best_of_block(scores: ScoreArray, keys: KeyArray, token_ids: IdArray | int) -> NDArray[np.int64]:
    bits = key_bits(keys, token_ids)
    if scores.shape[1] < _WIDE_ROW:
        return np.asarray(np.argmax(_race(scores, bits), axis=-1), np.int64)
    return np.array([_best_of_row(row, row_bits) for row, row_bits in zip(scores, bits, strict=True)], np.int64)


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
