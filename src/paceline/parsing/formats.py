"""Defines what a format of tool calls or of reasoning consists of, and how formats are recognised.

A chat template writes calls and reasoning of earlier turns in the format that the model generates. Each format has signs: strings that must
all be in the template. A sign that begins with "!" must not be in the template, because it belongs to another format with the same marks. A
sign may have alternatives, separated by " | ".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.parsing.events import EventSink, call_id
from paceline.parsing.text_stream import Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

ParseMarkup = Callable[[TextStream, EventSink], Parse[None]]
"""Parses what follows a mark. After MalformedError, what was passed and not emitted is text, the mark included."""


def including_mark(parse: ParseMarkup, num_chars: int) -> ParseMarkup:
    """Return a parser of markup that begins with the last `num_chars` characters of the mark."""

    def parse_from_mark(stream: TextStream, sink: EventSink) -> Parse[None]:
        stream.at -= num_chars
        yield from parse(stream, sink)

    return parse_from_mark


def section_of(mark: str, parse_call: ParseMarkup, close: str) -> ParseMarkup:
    """Return a parser of calls that each begin with `mark`, and of the end mark after them. The first `mark` may be missing."""

    def parse_section(stream: TextStream, sink: EventSink) -> Parse[None]:
        yield from stream.skip()
        yield from stream.take(mark)
        yield from parse_call(stream, sink)
        while sink.can_call and (yield from stream.take(mark)):
            yield from parse_call(stream, sink)
        yield from stream.take_or_end(close)

    return parse_section


class BuildCallGrammar(Protocol):
    """Returns a grammar of one call of any of `tools`, or of several calls."""

    def __call__(self, grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str: ...


def call_list(call: Callable[[ToolCallGrammar, Tool], str], between: str = "", before: str = "", after: str = "") -> BuildCallGrammar:
    """Return a function that builds the grammar of a list of calls.

    Args:
        call: builds the grammar of one call of a tool.
        between: text between two calls.
        before, after: texts around all calls.
    """

    def build(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
        calls = grammar.listed([call(grammar, tool) for tool in tools], between, several=several)
        return " ".join([*([grammar.literal(before)] if before else []), calls, *([grammar.literal(after)] if after else [])])

    return build


@dataclass(frozen=True, slots=True)
class Format:
    """Describes the markup of tool calls or of reasoning.

    Attributes:
        anywhere: the opening marks that are markup anywhere in the text, with their parsers.
        signs: texts that show the format in a chat template.
        tokens: special tokens of the markup, where the model has them.
        first: marks that are markup only before all text, with their parsers.
    """

    anywhere: Mapping[str, ParseMarkup]
    signs: tuple[str, ...]
    tokens: tuple[str, ...]
    first: Mapping[str, ParseMarkup] = field(default_factory=dict, kw_only=True)

    def is_shown_by(self, template: str) -> bool:
        """Return whether a chat template has the signs of the format."""
        wanted = [sign for sign in self.signs if not sign.startswith("!")]
        unwanted = [sign.removeprefix("!") for sign in self.signs if sign.startswith("!")]
        return (
            bool(wanted)
            and all(any(part in template for part in sign.split(" | ")) for sign in wanted)
            and not any(sign in template for sign in unwanted)
        )


@dataclass(frozen=True, slots=True)
class ToolCallFormat(Format):
    """Describes a format of tool calls.

    Attributes:
        grammar: builds a grammar of calls.
        opening: the token that begins each call, or all of them; empty if there is none.
        new_id: returns a new id of a call.
        text_signs: texts of calls that have no opening mark.
    """

    grammar: BuildCallGrammar
    opening: str = ""
    new_id: Callable[[], str] = call_id
    text_signs: tuple[str, ...] = ()

    def is_in(self, text: str) -> bool:
        """Return whether an opening mark or a token is in a text."""
        return any(mark in text for mark in (*self.anywhere, *self.tokens, *self.text_signs))


@dataclass(frozen=True, slots=True)
class ReasoningFormat(Format):
    """Describes a format of reasoning.

    Attributes:
        open, close: the marks before and after reasoning.
        opened: parses reasoning after a prompt that ends with `open`; None = no prompt does.
    """

    open: str = ""
    close: str = ""
    opened: ParseMarkup | None = None

    def is_in(self, text: str) -> bool:
        """Return whether a mark is in a text, or a token if the format has no marks."""
        return any(mark in text for mark in ((self.open, self.close) if self.open else self.tokens) if mark)
