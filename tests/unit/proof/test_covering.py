"""Cases are spread over everything that is combined, however few there are."""

from itertools import islice

import numpy as np
import pytest

from paceline.proof.exactness.cases import all_pairs, covering_rows, pairs_of

FACTORS = {"one": ["a", "b", "c"], "two": ["x", "y"], "three": ["1", "2", "3", "4", "5"], "four": ["p", "q", "r"]}


def test_covering_round_contains_every_pair_of_levels(seed: int) -> None:
    rows = []
    for round_number, row in covering_rows(FACTORS, np.random.default_rng(seed)):
        if round_number > 0:
            break
        rows.append(row)
    assert set(all_pairs(FACTORS)) == set().union(*map(pairs_of, rows))
    assert len(rows) <= 2 * 5 * 3, "the most that two factors alone ask for is 15"


@pytest.mark.parametrize("count", [5, 10, 15])
def test_few_covering_rows_contain_all_levels_and_most_pairs(count: int, seed: int) -> None:
    rows = [row for _, row in islice(covering_rows(FACTORS, np.random.default_rng(seed)), count)]
    for name, levels in FACTORS.items():
        assert len({row[name] for row in rows}) >= min(len(levels), count - 1)
    met = set().union(*map(pairs_of, rows))
    assert len(met) >= {5: 0.4, 10: 0.7, 15: 0.85}[count] * len(all_pairs(FACTORS))


def test_covering_rows_are_reproducible_by_seed() -> None:
    def first(seed: int) -> list[tuple[int, dict[str, str]]]:
        return list(islice(covering_rows(FACTORS, np.random.default_rng(seed)), 40))

    assert first(3) == first(3) != first(4)


def test_covering_rounds_continue_without_end(seed: int) -> None:
    rounds = [number for number, _ in islice(covering_rows(FACTORS, np.random.default_rng(seed)), 100)]
    assert rounds == sorted(rounds)
    assert rounds[-1] >= 3
