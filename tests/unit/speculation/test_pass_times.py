"""What passes cost by their rows, from made-up clocks."""

import pytest

from paceline.speculation.pass_times import PassTimes

KNOWN = {1: 1.0, 5: 1.4}


@pytest.mark.parametrize(("num_rows", "seconds"), [(1, 1.0), (3, 1.2), (5, 1.4), (9, 1.8), (80, 8.9)])
def test_between_and_beyond_what_was_measured_a_line_goes_on(num_rows: int, seconds: float) -> None:
    assert PassTimes(KNOWN).at(num_rows) == pytest.approx(seconds)


def test_more_rows_are_never_taken_to_cost_less_than_those_measured() -> None:
    times = PassTimes({1: 1.0, 5: 0.9})
    assert times.at(50) == pytest.approx(1.0)


def test_one_measured_number_of_rows_stands_for_all() -> None:
    assert PassTimes({1: 1.0}).at(7) == 1.0


def test_the_first_pass_of_as_many_rows_does_not_count() -> None:
    times = PassTimes(KNOWN)
    times.observe(9, 50.0)
    assert times.at(9) == pytest.approx(1.8)
    times.observe(9, 2.2)
    assert times.at(9) == 2.2
    assert times.at(7) == pytest.approx(1.8)


def test_the_fastest_of_the_last_passes_counts() -> None:
    times = PassTimes(KNOWN)
    for seconds in (9.0, 2.0, 8.0, 8.0):
        times.observe(9, seconds)
    assert times.at(9) == 2.0
    for _ in range(5):
        times.observe(9, 3.0)
    assert times.at(9) == 3.0


def test_what_was_known_before_gives_way_to_what_is_seen() -> None:
    times = PassTimes(KNOWN)
    times.observe(5, 9.0)
    times.observe(5, 2.0)
    assert times.at(5) == 2.0
    assert times.at(3) == pytest.approx(1.5)
