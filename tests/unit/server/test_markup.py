"""Calls and thoughts are found in what a model writes, wherever the pieces of its text begin."""

import json
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest

from harness.markup_cases import CASES, Case, events_of, said


def cut(text: str, places: tuple[int, ...]) -> list[str]:
    return [text[start:end] for start, end in pairwise((0, *places, len(text)))]


def every_split(text: str) -> Iterator[list[str]]:
    """All cuts into two pieces; of short texts also into three; and character by character."""
    yield list(text)
    for num_cuts in (1, 2) if len(text) <= 64 else (1,):
        for places in combinations(range(1, len(text)), num_cuts):
            yield cut(text, places)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.formats[0]}: {case.name}")
def test_an_answer_is_understood(case: Case) -> None:
    events, num_complete = events_of(case, [case.written])
    assert said(events) == case.said
    calls = [one for one in case.said if one[0] == "call"]
    assert num_complete == (len(calls) if case.num_complete is None else case.num_complete)
    for call in calls[:num_complete]:
        assert isinstance(json.loads(call[2]), dict)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.formats[0]}: {case.name}")
def test_every_split_of_an_answer_says_the_same(case: Case) -> None:
    for pieces in every_split(case.written):
        assert said(events_of(case, pieces)[0]) == case.said, pieces
