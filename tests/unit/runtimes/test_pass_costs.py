"""What passes are expected to cost, from made-up clocks."""

import numpy as np
import pytest

from paceline.runtimes.pass_costs import PassCosts, PassKind, PassTable

STAIRS = PassTable.of({1: 1.0, 8: 1.2, 9: 2.0, 16: 2.2})


@pytest.mark.parametrize(("rows", "seconds"), [(1, 1.0), (8, 1.2), (9, 2.0), (12, 2.0857), (16, 2.2), (23, 2.4)])
def test_a_staircase_stays_a_staircase(rows: int, seconds: float) -> None:
    assert STAIRS.at(rows) == pytest.approx(seconds, abs=1e-3)


def test_a_disturbed_pass_is_put_right_by_a_larger_one_that_was_not() -> None:
    table = PassTable.of({1: 1.0, 2: 9.0, 4: 1.3, 8: 1.2})
    assert table.seconds == {1: 1.0, 2: 1.2, 4: 1.2, 8: 1.2}


def test_one_number_of_rows_stands_for_all() -> None:
    assert PassTable.of({1: 1.0}).at(7) == 1.0


def test_reading_the_cache_is_added_for_sequences_and_for_rows() -> None:
    costs = PassCosts(PassTable.of({1: 1.0, 8: 1.2}, 0.001, 0.0001))
    assert costs.at(8, 1000, 8000) == pytest.approx(1.2 + 1.0 + 0.8)


def test_passes_that_ran_lately_count_more_than_the_table() -> None:
    costs = PassCosts(STAIRS)
    for _ in range(5):
        costs.observe(8, 0, 0, 1.8)
        costs.observe(1, 0, 0, 1.0)
    assert costs.at(8) == pytest.approx(1.8)
    assert costs.at(1) == pytest.approx(1.0)
    assert costs.is_fresh(8)
    assert not costs.is_fresh(9)


def test_the_first_pass_of_its_kind_and_two_are_not_enough() -> None:
    costs = PassCosts(STAIRS)
    for seconds in (50.0, 1.2, 1.2):
        costs.observe(8, 0, 0, seconds)
        assert not costs.is_fresh(8)
    costs.observe(8, 0, 0, 1.2)
    assert costs.is_fresh(8)
    assert costs.at(8) == pytest.approx(1.2)


def test_passes_with_adapters_are_known_apart_from_those_without() -> None:
    costs = PassCosts(STAIRS)
    for number in range(40):
        costs.kind = PassKind.ADAPTERS if number % 2 else PassKind.PLAIN
        costs.observe(1, 0, 0, 1.2 if number % 2 else 1.0)
    for kind, slower in ((PassKind.PLAIN, 1.0), (PassKind.ADAPTERS, 1.2)):
        costs.kind = kind
        assert costs.at(1) == pytest.approx(slower * 1.0)
        assert costs.at(8) == pytest.approx(slower * 1.2)
        assert costs.row_times(1, 7, 0, 0)[0][7] == pytest.approx(slower * 1.2)


def test_until_passes_with_adapters_ran_lately_they_are_taken_to_be_as_slow_as_others() -> None:
    costs = PassCosts(STAIRS)
    for _ in range(30):
        costs.observe(1, 0, 0, 3.0)
    costs.kind = PassKind.ADAPTERS
    assert costs.at(8) == pytest.approx(3 * 1.2)
    assert not costs.is_fresh(1)
    for _ in range(30):
        costs.observe(1, 0, 0, 4.0)
    assert costs.at(8) == pytest.approx(4 * 1.2)
    costs.kind = PassKind.PLAIN
    for _ in range(1100):
        costs.observe(1, 0, 0, 1.0)
    costs.kind = PassKind.ADAPTERS
    assert costs.at(8) == pytest.approx(1.2)
    costs.observe(8, 0, 0, 2.4)
    assert costs.at(8) == pytest.approx(2.4)  # what was known before plays no part


def test_on_a_machine_that_has_become_slower_what_did_not_run_is_taken_to_be_slower_too() -> None:
    costs = PassCosts(STAIRS)
    for _ in range(30):
        costs.observe(1, 0, 0, 3.0)
    assert costs.at(8) == pytest.approx(3 * 1.2)
    for _ in range(30):
        costs.observe(1, 0, 0, 1.0)
    assert costs.at(8) == pytest.approx(1.2)


def test_what_was_measured_long_ago_is_forgotten() -> None:
    costs = PassCosts(STAIRS)
    for _ in range(5):
        costs.observe(8, 0, 0, 7.0)
    for _ in range(1_100):
        costs.observe(1, 0, 0, 1.0)
    assert not costs.is_fresh(8)
    assert costs.at(8) == pytest.approx(1.2)


def test_bursts_of_other_programs_do_not_count(seed: int) -> None:
    costs, random = PassCosts(STAIRS), np.random.default_rng(seed)
    for _ in range(200):
        for rows in (1, 8):
            costs.observe(rows, 0, 0, STAIRS.at(rows) * (4.0 if random.random() < 0.3 else 1.0))
    assert costs.at(8) / costs.at(1) == pytest.approx(1.2, rel=0.05)


def test_passes_behind_long_texts_do_not_speak_for_those_behind_short_ones() -> None:
    costs = PassCosts(STAIRS)
    for _ in range(5):
        costs.observe(1, 8_000, 8_000, 1.9)
        costs.observe(1, 0, 0, 1.0)
    assert costs.at(1, 8_000, 8_000) == pytest.approx(1.9)
    assert costs.at(1) == pytest.approx(1.0)


def test_a_table_survives_json_and_nonsense_is_none() -> None:
    table = PassTable.of({1: 1.0, 8: 1.2}, 0.001, 0.0001)
    assert PassTable.from_json(table.as_json()) == table
    for kept in (None, 3, {}, {"seconds": {"1": 1.0}}, {"seconds": {"1": "x"}, "sequence_s": 0, "row_s": 0}, {"seconds": [], "row_s": 0}):
        assert PassTable.from_json(kept) is None
    assert PassTable.from_json({"seconds": {"1": -1.0, "2": 1.0}, "sequence_s": 0, "row_s": 0}) is None


def test_passes_told_of_together_count_as_if_they_had_been_told_of_one_by_one(seed: int) -> None:
    random, one_by_one, together = np.random.default_rng(seed), PassCosts(STAIRS), PassCosts(STAIRS)
    for _ in range(60):
        rows, cached, count = int(random.integers(1, 12)), 900.0 * int(random.integers(2)), int(random.integers(1, 20))
        times = [STAIRS.at(rows) * (1.0 + random.random()) for _ in range(count)]
        for seconds in times:
            one_by_one.observe(rows, cached, rows * cached, seconds)
        together.observe_several(rows, cached, rows * cached, times)
        for asked in range(1, 14):
            assert together.at(asked, cached, cached) == pytest.approx(one_by_one.at(asked, cached, cached), rel=1e-9)


def test_times_of_several_numbers_of_rows_are_those_of_each_but_never_fall(seed: int) -> None:
    random, costs = np.random.default_rng(seed), PassCosts(PassTable.of({1: 1.0, 8: 1.2, 9: 2.0, 16: 2.2}, 1e-4, 1e-5))
    for _ in range(40):
        rows, most, cached = int(random.integers(1, 20)), int(random.integers(0, 70)), 900.0 * int(random.integers(3))
        for _ in range(9):
            costs.observe(rows + int(random.integers(4)), cached, rows * cached, 1.0 + 2.0 * random.random())
        times, _ = costs.row_times(rows, most, cached, rows * cached)
        expected = np.maximum.accumulate([costs.at(rows + more, cached, rows * cached) for more in range(most + 1)])
        assert times[: most + 1] == pytest.approx(expected.tolist(), rel=1e-9)


def test_what_passes_with_a_scaling_pass_take_is_known_before_one_ran() -> None:
    costs = PassCosts(PassTable.of({1: 1.0, 8: 1.2}, 0.001, 0.0001))
    costs.kind = PassKind.SCALING
    assert costs.at(8, 1000, 8000) == pytest.approx(2 * (1.2 + 1.0 + 0.8))
    costs.kind = PassKind.PLAIN
    for _ in range(4):
        costs.observe(1, 0, 0, 3.0)
    costs.kind = PassKind.SCALING
    assert costs.at(8) == pytest.approx(2 * 3.0 * 1.2)


def test_a_time_of_some_passes_ago_is_doubted_where_others_are_much_quicker_now() -> None:
    costs = PassCosts(STAIRS)
    for _ in range(8):
        costs.observe(1, 0, 0, 3.0)
    assert not costs.is_doubted(1), "it was measured just now"
    for _ in range(40):
        costs.observe(8, 0, 0, 3.0 * STAIRS.at(8))
    assert not costs.is_doubted(1), "all are as slow"
    for _ in range(10):
        costs.observe(8, 0, 0, STAIRS.at(8))
    assert costs.is_doubted(1)
    assert not costs.is_doubted(8)
    for _ in range(3):
        costs.observe(1, 0, 0, 1.0)
    assert not costs.is_doubted(1)
    assert costs.at(1) == pytest.approx(1.0)
