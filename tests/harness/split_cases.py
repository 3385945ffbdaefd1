"""Answers of one format as rows of a table, read whole and in pieces."""

import json
from collections.abc import Iterator, Sequence

from harness.markup_cases import Case, Said, events_of, said

Row = tuple[str, Said]
"""What a model wrote, and what it says."""


def cases(tools: str, think: str, rows: Sequence[Row]) -> list[Case]:
    """The cases of a format."""
    return [Case(written, (tools, think), written, expected) for written, expected in rows]


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
    """That every split of an answer says the right things, and that arguments are objects even where a call breaks off."""
    for pieces in pieces_of(case.written):
        found = said(events_of(case, pieces)[0])
        assert found == case.said, pieces
        assert all(isinstance(json.loads(one[2]), dict) for one in found if one[0] == "call")
