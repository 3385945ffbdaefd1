"""Which cases of a large parametrisation a normal run takes: some that lie apart, with every value of every axis among them."""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from math import ceil
from typing import Any

import pytest

GOLDEN = 0.618034


def mark_cases(cases: Iterable[tuple[Any, ...]], in_a_normal_run: Container[tuple[Any, ...]]) -> list[Any]:
    """Cases for `parametrize`, named by their values; those that a normal run leaves out are marked as long."""
    return [pytest.param(*case, id="-".join(map(str, case)), marks=() if case in in_a_normal_run else pytest.mark.long) for case in cases]


def mark_the_others(items: Sequence[pytest.Item]) -> None:
    """Mark as long what `@pytest.mark.spread(share)` leaves out of a normal run, of every test that has it."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("spread") and not item.get_closest_marker("long"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("spread")
        assert marker is not None
        chosen = spread([item.callspec.params for item in cases], *marker.args)  # type: ignore[attr-defined]
        for number, item in enumerate(cases):
            if number not in chosen:
                item.add_marker("long")


def spread(cases: Sequence[Mapping[str, object]], share: float) -> set[int]:
    """Numbers of cases: as few as hold every value of every axis, then others, evenly, up to a share of them all.

    What has another value in every case is no axis.
    """
    named = [{(axis, repr(value)) for axis, value in case.items()} for case in cases]
    counts = Counter(axis for axis, _ in set().union(*named))
    left = {value for values in named for value in values if counts[value[0]] < len(cases)}
    apart = sorted(range(len(cases)), key=lambda number: number * GOLDEN % 1)
    chosen: set[int] = set()
    while left:
        best = max(apart, key=lambda number: len(named[number] & left))
        chosen.add(best)
        left -= named[best]
    missing = ceil(share * len(cases)) - len(chosen)
    others = [number for number in range(len(cases)) if number not in chosen]
    return chosen | {others[at * len(others) // missing] for at in range(max(missing, 0))}
