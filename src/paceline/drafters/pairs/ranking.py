"""The best scores of a row over a vocabulary, without sorting it."""

import numpy as np
from numpy.typing import NDArray

from paceline.runtimes.base import FloatArray

_WIDE_ROW = 8192
_STRIDE = 256
_FEW = 6  # up to this many are searched one by one


def best_scores(scores: FloatArray, count: int) -> NDArray[np.int64]:
    """Positions of the `count` largest scores, largest first, lower positions first on ties; those at -inf may be left out."""
    if count == 1:
        return np.array([np.argmax(scores)], np.int64)
    size = len(scores)
    if size < _WIDE_ROW:
        return _best_of(np.arange(size), scores, count)
    whole = size - size % _STRIDE
    peaks = scores[:whole].reshape(-1, _STRIDE).max(axis=1)
    if count <= _FEW:
        return _one_by_one(scores, peaks, count)
    # only strides with a large maximum can hold one of them
    strides = np.flatnonzero(peaks >= np.partition(peaks, len(peaks) - count)[len(peaks) - count])
    inside = (strides[:, None] * _STRIDE + np.arange(_STRIDE)).ravel()
    candidates = np.concatenate((inside, np.arange(whole, size)))
    return _best_of(candidates, scores[candidates], count)


def _one_by_one(scores: FloatArray, peaks: FloatArray, count: int) -> NDArray[np.int64]:
    """Each time the stride with the largest maximum gives its best and gets a new maximum. `peaks` is changed."""
    end = len(peaks) * _STRIDE
    left = {len(peaks): scores[end:].copy()}  # strides without what was taken; the last entry holds the scores after the last stride
    peaks = np.append(peaks, left[len(peaks)].max(initial=-np.inf))
    best = np.empty(count, np.int64)
    for rank in range(count):
        stride = int(peaks.argmax())
        if peaks[stride] == -np.inf:
            return best[:rank]
        if stride not in left:
            left[stride] = scores[stride * _STRIDE : (stride + 1) * _STRIDE].copy()
        values = left[stride]
        place = int(values.argmax())
        best[rank] = stride * _STRIDE + place
        values[place] = -np.inf
        peaks[stride] = values.max()
    return best


def _best_of(candidates: NDArray[np.int64], values: FloatArray, count: int) -> NDArray[np.int64]:
    """The best of candidates given in ascending order."""
    if len(values) > count:
        least = np.partition(values, len(values) - count)[len(values) - count]
        candidates, values = candidates[values >= least], values[values >= least]
    return candidates[np.argsort(-values, kind="stable")[:count]]
