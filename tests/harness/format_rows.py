"""Answers of one format as rows of a table, parsed whole and in pieces."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from harness.markup_cases import Case, Parsed, events_of, parsed

Row = tuple[str, Parsed]
"""What a model wrote, and what it consists of."""
NOW = ("call", "now", "{}")


def weather(**arguments: Any) -> tuple[str, ...]:
    """A call of the tool `weather`."""
    return ("call", "weather", json.dumps(arguments, ensure_ascii=False))


def text(*texts: str) -> Parsed:
    """An answer of texts alone."""
    return [("text", one) for one in texts]


def cases(tool_calls: str, reasoning: str, rows: Sequence[Row]) -> list[Case]:
    """The cases of a format, named after the end of their text."""
    return [Case(f"{output[-100:]!a}", (tool_calls, reasoning), output, expected) for output, expected in rows]


def name_of(case: Case) -> str:
    """The name of a case in a report."""
    return f"{', '.join(dict.fromkeys(case.formats))}: {case.name}"


def parse(formats: tuple[str, str], pieces: Iterable[str], **fields: Any) -> Parsed:
    """What an answer consists of that arrives in pieces; `fields` are those of a case."""
    return parsed(events_of(Case("", formats, "", [], **fields), pieces)[0])


def pieces_of(text: str, *, every_cut: bool = True) -> Iterator[list[str]]:
    """The whole text, its characters and, on request, all cuts into two; of a long text 1,000 to 2,000 of them."""
    yield [text]
    yield list(text)
    for place in range(1, len(text), max(1, len(text) // 1000)) if every_cut else ():
        yield [text[:place], text[place:]]


def longest_of_formats(formats_and_texts: Iterable[tuple[tuple[str, str], str]]) -> set[str]:
    """The longest text of up to 300 characters of each format: the texts that short runs cut everywhere."""
    longest: dict[tuple[str, str], str] = {}
    for formats, text in formats_and_texts:
        longest[formats] = max(longest.get(formats, ""), text if len(text) <= 300 else "", key=len)
    return set(longest.values())


def check(case: Case, *, every_cut: bool = True) -> None:
    """Assert that an answer has the expected parts however it is cut, and that arguments are objects even where a call breaks off."""
    for pieces in pieces_of(case.output, every_cut=every_cut):
        found = parsed(events_of(case, pieces)[0])
        assert found == case.expected, pieces
        assert all(isinstance(json.loads(one[2]), dict) for one in found if one[0] == "call")
