"""<|tool_call|>[{"name": …, "arguments": {…}}, …]: Granite 3.1 to 3.3."""

from collections.abc import Sequence

from paceline.server.dialogue.request import Tool
from paceline.server.markup.answer import Markers
from paceline.server.markup.call_grammar import CallGrammar
from paceline.server.markup.envelope import envelope_head
from paceline.server.markup.mistral import read_list
from paceline.server.markup.source import Reading, Source
from paceline.server.markup.writer import Writer

OPEN = "<|tool_call|>"


def read_calls(source: Source, writer: Writer) -> Reading[None]:
    yield from source.skip()
    yield from source.expect("[")
    yield from read_list(source, writer)


MARKERS = Markers(anywhere={OPEN: read_calls})


def calls_grammar(grammar: CallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    calls = [grammar.call(envelope_head(tool.name), tool, "}") for tool in tools]
    return f'{grammar.text(OPEN + "[")} {grammar.listed(calls, ", ", several=several)} "]"'
