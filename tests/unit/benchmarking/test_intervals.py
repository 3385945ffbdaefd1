"""Medians, paired ratios and their intervals, against values worked out by hand."""

import itertools
import statistics

from paceline.benchmarking.intervals import Quartiles, Ratio, paired_ratio


def test_quartiles_of_values_are_interpolated() -> None:
    assert Quartiles.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Quartiles(2.0, 3.0, 4.0)
    assert Quartiles.of([1.0, 2.0]) == Quartiles(1.25, 1.5, 1.75)
    assert Quartiles.of([]) is None


def test_paired_ratio_compares_values_of_the_same_round() -> None:
    """Over rounds the machine halves its speed; the mode is one and a half times plain in each of them."""
    found = paired_ratio([30.0, 15.0, 7.5], [20.0, 10.0, 5.0])
    assert found == Ratio(1.5, 1.5, 1.5, (1.5, 1.5, 1.5))
    assert statistics.median([30.0, 15.0, 7.5]) / statistics.median([20.0, 5.0, 10.0]) == 1.5


def test_paired_ratio_is_the_median_of_ratios_not_the_ratio_of_medians() -> None:
    """Nor one of values and baselines in another order."""
    assert paired_ratio([10.0, 20.0, 30.0], [30.0, 10.0, 10.0]).median == 2.0


def test_paired_ratio_interval_equals_the_enumerated_bootstrap() -> None:
    """Of three ratios there are 27 resamples; their medians are 1, 2 and 4 with the weights 7, 13 and 7."""
    ratios = [1.0, 2.0, 4.0]
    medians = sorted(statistics.median(drawn) for drawn in itertools.product(ratios, repeat=3))
    assert (medians.count(1.0), medians.count(2.0), medians.count(4.0)) == (7, 13, 7)
    found = paired_ratio([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    assert (found.low, found.median, found.high) == (1.0, 2.0, 4.0)  # 2.5 % lie within the first 7 of 27


def test_paired_ratio_interval_of_many_rounds_excludes_outliers() -> None:
    """Of nine ratios the median of a resample is the smallest only if five or more draws are: 0.9 of 1000 resamples."""
    found = paired_ratio([0.1, *[2.0 + number / 100 for number in range(7)], 9.0], [1.0] * 9)
    assert found.low is not None
    assert found.high is not None
    assert 2.0 <= found.low < found.median < found.high <= 2.06


def test_paired_ratio_of_one_round_has_no_interval() -> None:
    assert paired_ratio([3.0], [2.0]) == Ratio(1.5, None, None, (1.5,))


def test_paired_ratio_interval_is_reproducible_by_seed() -> None:
    values, plain = [1.0, 1.3, 1.1, 1.9, 1.4], [1.0] * 5
    assert paired_ratio(values, plain, seed=3) == paired_ratio(values, plain, seed=3)
