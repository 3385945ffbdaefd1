"""Defines what a format of tool calls or of reasoning consists of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.parsing.event_sink import call_id
from paceline.parsing.markers import Markers, ParseMarkup
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool


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
class ToolCallFormat:
    """Describes a format of tool calls: its parsers, signs, tokens and grammar.

    Attributes:
        markers: the opening marks of calls, with their parsers.
        signs: texts that show the format in a chat template, as `detection.shows_format` reads them.
        tokens: special tokens of the markup, where the model has them.
        grammar: builds a grammar of calls.
        opening: the token that begins each call, or all of them; empty if there is none.
        new_id: returns a new id of a call.
        text_signs: texts of calls that have no opening mark.
    """

    markers: Markers
    signs: tuple[str, ...]
    tokens: tuple[str, ...]
    grammar: BuildCallGrammar
    opening: str = ""
    new_id: Callable[[], str] = call_id
    text_signs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Describes a format of reasoning; the first three attributes are as for `ToolCallFormat`.

    Attributes:
        open, close: the marks before and after reasoning.
        opened: parses reasoning after a prompt that ends with `open`; None = no prompt does.
    """

    markers: Markers
    signs: tuple[str, ...]
    tokens: tuple[str, ...]
    open: str = ""
    close: str = ""
    opened: ParseMarkup | None = None
