"""Choosing cases so that any number of them is spread over everything that can be combined.

A covering array of strength 2, row by row: every row meets as many pairs of levels as it can that no row has met before. When all pairs
have been met, a new round begins. So a few rows already meet most pairs, and whoever stops early has left out no factor.

Source: Cohen, Dalal, Fredman, Patton 1997, "The AETG system", section 4, with one candidate a row and rounds that do not end.
"""

from collections import Counter
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
    """A row that begins with the level that is in most of the `wanted` pairs, and takes of each other factor the one that meets most."""
    remaining = Counter(level for pair in wanted for level in sorted(pair))
    levels = list(remaining)
    random.shuffle(levels)
    row = dict([max(levels, key=remaining.__getitem__)])
    others = [name for name in factors if name not in row]
    random.shuffle(others)
    for name in others:
        choices = list(factors[name])
        random.shuffle(choices)
        row[name] = max(choices, key=lambda level: sum(frozenset(((name, level), known)) in wanted for known in row.items()))
    return {name: row[name] for name in factors}
