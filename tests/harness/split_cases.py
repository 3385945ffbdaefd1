"""Answers of one format as rows of a table, read whole and in pieces."""

import json
from collections.abc import Iterator, Sequence

from harness.markup_cases import Case, Said, events_of, said

Row = tuple[str, Said] | tuple[str, Said, int]
"""What a model wrote, what it says, and how many of its calls are complete; all of them where that is left out."""


def cases(tools: str, think: str, rows: Sequence[Row]) -> list[Case]:
    """The cases of a format."""
    return [Case(row[0], (tools, think), row[0], row[1], num_complete=row[2] if len(row) == 3 else None) for row in rows]


def case_id(case: Case) -> str:
    """A name for a case."""
    return f"{case.formats[0]}: {case.name[-100:]!a}"


def pieces_of(text: str) -> Iterator[list[str]]:
    """The whole text, its characters, and all cuts into two."""
    yield [text]
    yield list(text)
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]


def check(case: Case) -> None:
    """That every split of an answer says the right things, and that arguments are objects even where a call is not complete."""
    num_calls = sum(one[0] == "call" for one in case.said)
    for pieces in pieces_of(case.written):
        events, num_complete = events_of(case, pieces)
        found = said(events)
        assert found == case.said, pieces
        assert num_complete == (num_calls if case.num_complete is None else case.num_complete)
        assert all(isinstance(json.loads(one[2]), dict) for one in found if one[0] == "call")
