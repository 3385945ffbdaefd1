"""Answers of one format as rows of a table, parsed whole and in pieces."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.markup_cases import TOOLS
from paceline.parsing.events import Event, Reasoning, Text, ToolCallArguments, ToolCallStart, merged
from paceline.parsing.registry import OutputFormat

Parsed = list[tuple[str, ...]]
"""("text", …), ("reasoning", …) or ("call", name, arguments) in the order written."""
Row = tuple[str, Parsed]
"""What a model wrote, and what it consists of."""


@dataclass(frozen=True, slots=True)
class FormatCase:
    """An answer in a format.

    Attributes:
        formats: of tool calls and of reasoning.
    """

    formats: tuple[str, str]
    output: str
    expected: Parsed

    def __str__(self) -> str:
        return f"{self.formats[0]}: {self.output[-100:]!a}"


def cases(tool_calls: str, reasoning: str, rows: Sequence[Row]) -> list[FormatCase]:
    """The cases of a format."""
    return [FormatCase((tool_calls, reasoning), output, expected) for output, expected in rows]


def parse(formats: tuple[str, str], pieces: Iterable[str], *, parallel: bool = True, is_opened: bool = False) -> Parsed:
    """What an answer consists of that arrives in pieces."""
    output_format = OutputFormat(*formats)
    sink = output_format.sink(0, TOOLS, several=parallel)
    reading = output_format.reading(TOOLS, sink, in_reasoning=is_opened)
    events: list[Event] = []
    for piece in pieces:
        reading.push(piece)
        events += sink.take()
    reading.finish()
    assert reading.is_done
    return parsed(events + sink.take())


def parsed(events: Sequence[Event]) -> Parsed:
    """What events amount to, ids left out."""
    found: Parsed = []
    for event in merged(events):
        if isinstance(event, Text | Reasoning):
            found.append(("text" if isinstance(event, Text) else "reasoning", event.text))
        elif isinstance(event, ToolCallStart):
            found.append(("call", event.name, ""))
        elif isinstance(event, ToolCallArguments):
            found[-1] = ("call", found[-1][1], event.json)
    return found


def pieces_of(text: str) -> Iterator[list[str]]:
    """The whole text, its characters, and all cuts into two."""
    yield [text]
    yield list(text)
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]


def check(case: FormatCase) -> None:
    """Assert that every split of an answer has the expected parts, and that arguments are objects even where a call breaks off."""
    for pieces in pieces_of(case.output):
        found = parse(case.formats, pieces)
        assert found == case.expected, pieces
        assert all(isinstance(json.loads(one[2]), dict) for one in found if one[0] == "call")
