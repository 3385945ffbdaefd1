"""Choosing cases so that any number of them is spread over everything that can be combined.

A covering array of strength 2, row by row: every row meets as many pairs of levels as it can that no row has met before. When all pairs
have been met, a new round begins. So a few rows already meet most pairs, and whoever stops early has left out no factor.

Source: Cohen, Dalal, Fredman, Patton 1997, "The AETG system", section 4, with one candidate a row and rounds that do not end.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

import numpy as np

Factors: TypeAlias = Mapping[str, Sequence[str]]
"""The levels of each factor."""

Level: TypeAlias = tuple[str, str]  # factor, level
Pair: TypeAlias = frozenset[Level]


def all_pairs(factors: Factors) -> list[Pair]:
    """Every pair of levels of two factors, in one order."""
    return [
        frozenset(((first, one), (second, other)))
        for first, second in combinations(factors, 2)
        for one in factors[first]
        for other in factors[second]
    ]


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """The pairs that a row meets."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def covering_rows(factors: Factors, random: np.random.Generator) -> Iterator[tuple[int, dict[str, str]]]:
    """The number of the round from 0 on, and a level of each factor; without end.

    Args:
        factors: at least two, each with at least one level.
        random: decides between levels that meet as many new pairs.
    """
    round_number = 0
    while True:
        wanted = dict.fromkeys(all_pairs(factors))
        while wanted:
            row = _next_row(factors, wanted, random)
            for pair in pairs_of(row):
                wanted.pop(pair, None)
            yield round_number, row
        round_number += 1


def _next_row(factors: Factors, wanted: Mapping[Pair, None], random: np.random.Generator) -> dict[str, str]:
    """A row that begins with a pair that no row has met, and takes for each other factor the level that meets most of them."""
    pairs = list(wanted)
    row = dict(sorted(pairs[int(random.integers(len(pairs)))], key=lambda level: list(factors).index(level[0])))
    others = [name for name in factors if name not in row]
    random.shuffle(others)
    for name in others:
        levels = list(factors[name])
        random.shuffle(levels)
        row[name] = max(levels, key=lambda level: sum(frozenset(((name, level), known)) in wanted for known in row.items()))
    return {name: row[name] for name in factors}
