"""Quartiles, paired ratios and their bootstrap intervals, for values of a few rounds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Quartiles:
    """A median between the quartiles (linear interpolation between ordered values)."""

    lower_quartile: float
    median: float
    upper_quartile: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles | None":
        """Return the quartiles of some values; None without any."""
        if not values:
            return None
        low, median, high = (float(value) for value in np.quantile(np.asarray(values, np.float64), (0.25, 0.5, 0.75)))
        return cls(low, median, high)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of paired ratios and its bootstrap interval at `CONFIDENCE`; one pair has no interval.

    Attributes:
        low, high: None where there is one pair.
        pairs: the ratio of each round.
    """

    median: float
    low: float | None
    high: float | None
    pairs: tuple[float, ...]


def paired_ratio(values: Sequence[float], baseline: Sequence[float], *, seed: int = 0) -> Ratio:
    """Return the median ratio of values to a baseline, paired by round.

    Args:
        values, baseline: one a round, of the same rounds in the same order; at least one.

    Source: percentile bootstrap, Efron and Tibshirani 1993, chapter 13: the median of ratios that are drawn again with replacement.
    """
    pairs = np.asarray(values, np.float64) / np.asarray(baseline, np.float64)
    median = float(np.median(pairs))
    ratios = tuple(float(pair) for pair in pairs)
    if len(pairs) < 2:
        return Ratio(median, None, None, ratios)
    drawn = np.random.default_rng(seed).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(pairs[drawn], axis=1), (tail, 1 - tail))
    return Ratio(median, float(low), float(high), ratios)
