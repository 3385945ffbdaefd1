"""Which guesses are taken, beside every other way to take some."""

from itertools import product

import numpy as np
import pytest

from paceline.speculation.row_choice import choose_rows, worth_keeping, worth_keeping_together


def path_chances(chances: list[float]) -> list[float]:
    """Of guesses in a row."""
    return np.cumprod(chances).tolist()  # type: ignore[no-any-return]


def staircase(random: np.random.Generator, count: int) -> list[float]:
    """Seconds of a step by its rows, in stairs of random height."""
    heights = np.cumsum(random.uniform(0.0, 0.4, count + 1) * (random.random(count + 1) < 0.3)) + 1.0
    return heights.tolist()  # type: ignore[no-any-return]


def mean_speed(tokens: list[float], others: int, seconds: float) -> float:
    """The geometric mean of requests' speeds, of which those of `others` emit a token each."""
    return float(np.exp(np.mean(np.log([*tokens, *[1.0] * others])))) / seconds


def test_no_other_way_to_take_guesses_promises_that_requests_are_faster(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(150):
        size, others = int(random.integers(1, 4)), int(random.integers(0, 3))
        gains = [path_chances(random.uniform(0.0, 1.0, int(random.integers(0, 5))).tolist()) for _ in range(size)]
        times = staircase(random, int(random.integers(0, 12)))
        choice = choose_rows(gains, times, [(0.0, 0.0)], others=others)
        assert sum(choice.counts) < len(times)
        ways = [way for way in product(*(range(len(own) + 1) for own in gains)) if sum(way) < len(times)]
        tokens = [[1.0 + sum(own[:count]) for own, count in zip(gains, way, strict=True)] for way in ways]
        speeds = [mean_speed(own, others, times[sum(way)]) for own, way in zip(tokens, ways, strict=True)]
        assert choice.speedup == pytest.approx(max(speeds) * times[0])
        assert choice.seconds == times[sum(choice.counts)]
        assert choice.tokens == pytest.approx(sum(tokens[ways.index(tuple(choice.counts))]) + others)


def test_nobody_is_delayed_for_anothers_guesses_by_more_than_they_bring() -> None:
    """Most tokens a second in all would be had: 4 + 4 in 1.6 instead of 4 in 1."""
    assert choose_rows([[1.0, 1.0, 1.0, 1.0]], [1.0, 1.6, 1.6, 1.6, 1.6], [(0.0, 0.0)], others=3).counts == [0]
    assert choose_rows([[1.0, 1.0, 1.0, 1.0]], [1.0, 1.4, 1.4, 1.4, 1.4], [(0.0, 0.0)], others=3).counts == [4]
    assert choose_rows([[1.0] * 4] * 4, [1.0, *[1.6] * 16], [(0.0, 0.0)]).counts == [4] * 4


def test_of_guesses_that_were_made_for_several_those_are_kept_that_make_them_fastest(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(150):
        size, others = int(random.integers(1, 4)), int(random.integers(0, 3))
        gains = [sorted(random.uniform(0.0, 1.0, int(random.integers(0, 5))).tolist(), reverse=True) for _ in range(size)]
        times = staircase(random, int(random.integers(0, 14)))
        counts = worth_keeping_together(gains, times, others)
        ways = [way for way in product(*(range(len(own) + 1) for own in gains)) if sum(way) < len(times)]
        speeds = {
            way: mean_speed([1.0 + sum(own[:count]) for own, count in zip(gains, way, strict=True)], others, times[sum(way)])
            for way in ways
        }
        assert speeds[tuple(counts)] == pytest.approx(max(speeds.values()))
    assert worth_keeping_together([[0.5], [0.5]], [1.0, 1.2, 1.4], 0, 0.05) == [1, 1]
    assert worth_keeping_together([[0.5], [0.5]], [1.0, 1.2, 1.4], 0, 0.08) == [0, 0]


def test_of_one_request_the_best_length_is_found_whatever_guessing_takes(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(150):
        own, times = path_chances(random.uniform(0.0, 1.0, 8).tolist()), staircase(random, 8)
        fixed, deeper = random.choice([0.0, 0.02, 0.2], 2).tolist()
        choice = choose_rows([own], times, [(fixed, deeper)])
        rates = [(1 + sum(own[:count])) / (times[count] + (fixed + deeper * count if count else 0.0)) for count in range(9)]
        assert choice.rate == pytest.approx(max(rates))
        assert choice.drafted_speedup == pytest.approx(max(rates[1:]) * times[0])


def test_a_row_that_pays_only_together_with_the_next_is_taken_with_it() -> None:
    """The first guess makes the pass as slow as four do."""
    assert choose_rows([path_chances([0.6] * 4)], [1.0, 1.7, 1.7, 1.7, 1.7], [(0.0, 0.0)]).counts == [4]
    assert choose_rows([[0.6]], [1.0, 1.7], [(0.0, 0.0)]).counts == [0]


@pytest.mark.parametrize(("least_gain", "counts"), [(0.0, [1]), (0.05, [0])])
def test_a_small_gain_is_left_alone_where_more_is_asked(least_gain: float, counts: list[int]) -> None:
    choice = choose_rows([[0.13]], [1.0, 1.1], [(0.0, 0.0)], least_gain=least_gain)
    assert choice.counts == counts
    assert choice.drafted_speedup == pytest.approx(1.13 / 1.1), "what was left is told in any case"


def test_guessing_is_paid_for_by_drafter_with_its_deepest_guess() -> None:
    """Three guesses of the first drafter, two deep, one of the second."""
    choice = choose_rows([[0.9, 0.5], [0.8], [0.7]], [1.0] * 9, [(0.01, 0.1), (0.02, 0.2)], drafters=[0, 1, 0])
    assert choice.counts == [2, 1, 1]
    assert choice.seconds == pytest.approx(1.0 + 0.01 + 2 * 0.1 + 0.02 + 0.2)


def test_made_guesses_are_kept_as_far_as_they_are_worth_their_rows(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(200):
        gains = sorted(random.uniform(0.0, 1.0, int(random.integers(1, 20))).tolist(), reverse=True)
        heights = np.cumsum(random.uniform(0.0, 0.3, 32) * (random.random(32) < 0.4)) + 1.0
        rate = float(random.uniform(0.5, 3.0))
        kept = worth_keeping(gains, heights.tolist(), rate)
        values = [sum(gains[:count]) - rate * heights[count] for count in range(len(gains) + 1)]
        assert values[kept] == pytest.approx(max(values))


def test_requests_that_guess_nothing_are_delayed_by_rows_all_the_same() -> None:
    times = [1.0, 1.1, 1.2]
    alone = choose_rows([[0.5]], times, [(0.0, 0.0)])
    assert alone.counts == [1]
    assert alone.speedup == pytest.approx(1.5 / 1.1)
    beside = choose_rows([[0.5]], times, [(0.0, 0.0)], others=7)
    assert beside.counts == [0]
    assert beside.speedup == 1.0
    assert beside.drafted_speedup == pytest.approx(1.5 ** (1 / 8) / 1.1)
