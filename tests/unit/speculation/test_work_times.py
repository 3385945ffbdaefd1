"""Times of work that is made of two parts, from made-up clocks."""

import numpy as np
import pytest

from paceline.speculation.work_times import LinearTime


def test_both_parts_are_found_where_work_differs(seed: int) -> None:
    random, times = np.random.default_rng(seed), LinearTime()
    for _ in range(200):
        x, y = float(random.integers(1, 9)), float(random.integers(0, 30))
        times.observe(x, y, (0.003 * x + 0.0004 * y) * random.uniform(0.98, 1.02))
    assert times.at(4.0, 0.0) == pytest.approx(0.012, rel=0.05)
    assert times.at(0.0, 10.0) == pytest.approx(0.004, rel=0.1)


def test_the_same_work_told_of_together_counts_as_if_it_had_been_told_of_time_by_time(seed: int) -> None:
    random, one_by_one, together = np.random.default_rng(seed), LinearTime(), LinearTime()
    for _ in range(30):
        x, y = float(random.integers(1, 9)), float(random.integers(0, 30))
        measured = [(0.003 * x + 0.0004 * y) * random.uniform(0.9, 1.1) for _ in range(int(random.integers(1, 33)))]
        measured[-1] *= random.choice([1.0, 40.0])
        for seconds in measured:
            one_by_one.observe(x, y, seconds)
        together.observe_several(x, y, measured)
    assert together.parts == pytest.approx(one_by_one.parts, rel=1e-9)


def test_one_slow_time_of_many_says_little() -> None:
    times = LinearTime()
    times.observe_several(1.0, 4.0, [0.001] * 20)
    times.observe_several(1.0, 4.0, [0.001, 9.0, 0.001])
    assert times.at(1.0, 4.0) < 0.0013


def test_work_that_takes_longer_for_good_is_soon_known_to() -> None:
    times = LinearTime()
    times.observe_several(1.0, 4.0, [0.001] * 20)
    times.observe_several(1.0, 4.0, [0.1] * 60)
    assert times.at(1.0, 4.0) > 0.05


def test_a_slow_first_call_is_forgotten_after_a_few_quick_ones() -> None:
    time = LinearTime()
    for seconds in (50.0, 1.0, 1.0, 1.0):
        time.observe(1.0, 4.0, seconds)
    assert time.at(1.0, 4.0) < 3.0


def test_three_quick_calls_in_a_row_say_that_those_before_were_held_up() -> None:
    time = LinearTime()
    for seconds in (9.0,) * 40 + (1.0,) * 2:
        time.observe(1.0, 4.0, seconds)
    assert time.at(1.0, 4.0) > 7.0, "two may be chance"
    time.observe(1.0, 4.0, 1.0)
    assert time.at(1.0, 4.0) < 4.0


def test_what_parts_take_is_forgotten_where_there_were_none_for_long() -> None:
    """A time that keeps everybody from having parts would stay for ever."""
    time = LinearTime()
    time.observe(4.0, 4.0, 0.1)
    time.observe_several(4.0, 0.0, (0.001,) * 100)
    assert time.at(0.0, 1.0) > 0.01
    time.observe_several(4.0, 0.0, (0.001,) * 100)
    assert time.at(0.0, 1.0) == 0.0
    assert time.at(4.0, 0.0) == pytest.approx(0.001, rel=0.01)
