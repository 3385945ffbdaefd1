"""Which guesses are taken, beside every other way to take some."""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest

from paceline.speculation.acceptance import path_chances
from paceline.speculation.row_choice import choose_rows, worth_keeping


def staircase(random: np.random.Generator) -> Callable[[Sequence[int], int], float]:
    """Seconds of a step: rows in stairs of random height, and guessing that takes as long as its deepest request."""
    heights = np.cumsum(random.uniform(0.0, 0.4, 64) * (random.random(64) < 0.3)) + 1.0
    deeper = float(random.choice([0.0, 0.02, 0.2]))
    return lambda counts, total: float(heights[total]) + deeper * max(counts, default=0)


def flat_staircase(random: np.random.Generator) -> Callable[[Sequence[int], int], float]:
    """The same without what depends on who guesses: there the choice is the best of all."""
    heights = np.cumsum(random.uniform(0.0, 0.4, 64) * (random.random(64) < 0.3)) + 1.0
    return lambda counts, total: float(heights[total])


def test_no_other_way_to_take_guesses_promises_more_tokens_a_second(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(150):
        size = int(random.integers(1, 4))
        gains = [path_chances(random.uniform(0.0, 1.0, int(random.integers(0, 5))).tolist()) for _ in range(size)]
        seconds, most = flat_staircase(random), int(random.integers(0, 12))
        choice = choose_rows(gains, seconds, most)
        assert sum(choice.counts) <= most
        ways = [way for way in product(*(range(len(own) + 1) for own in gains)) if sum(way) <= most]
        rates = [(size + sum(sum(own[:count]) for own, count in zip(gains, way, strict=True))) / seconds(way, sum(way)) for way in ways]
        assert choice.rate == pytest.approx(max(rates))
        assert choice.seconds == seconds(choice.counts, sum(choice.counts))


def test_of_one_request_the_best_length_is_found_whatever_guessing_takes(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(150):
        own = path_chances(random.uniform(0.0, 1.0, 8).tolist())
        seconds = staircase(random)
        choice = choose_rows([own], seconds, 8)
        assert choice.rate == pytest.approx(max((1 + sum(own[:count])) / seconds([count], count) for count in range(9)))


def test_a_row_that_pays_only_together_with_the_next_is_taken_with_it() -> None:
    """The first guess makes the pass as slow as four do."""
    choice = choose_rows([path_chances([0.6] * 4)], lambda counts, total: 1.0 + 0.7 * (total > 0), 4)
    assert choice.counts == (4,)
    assert choose_rows([[0.6]], lambda counts, total: 1.0 + 0.7 * (total > 0), 4).counts == (0,)


@pytest.mark.parametrize(("least_gain", "counts"), [(0.0, (1,)), (0.05, (0,))])
def test_a_small_gain_is_left_alone_where_more_is_asked(least_gain: float, counts: tuple[int, ...]) -> None:
    choice = choose_rows([[0.13]], lambda _, total: 1.0 + 0.1 * total, 1, least_gain=least_gain)
    assert choice.counts == counts
    assert choice.drafted_speedup == pytest.approx(1.13 / 1.1), "what was left is told in any case"


def test_made_guesses_are_kept_as_far_as_they_are_worth_their_rows(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(200):
        gains = sorted(random.uniform(0.0, 1.0, int(random.integers(1, 20))).tolist(), reverse=True)
        heights = np.cumsum(random.uniform(0.0, 0.3, 32) * (random.random(32) < 0.4)) + 1.0
        rate = float(random.uniform(0.5, 3.0))
        kept = worth_keeping(gains, lambda count, heights=heights: float(heights[count]), rate)  # type: ignore[misc]
        values = [sum(gains[:count]) - rate * heights[count] for count in range(len(gains) + 1)]
        assert values[kept] == pytest.approx(max(values))
