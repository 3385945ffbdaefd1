"""<|tool_call|>[{"name": …, "arguments": {…}}, …]: Granite 3.1 to 3.3."""

from collections.abc import Sequence

from paceline.parsing.event_sink import Writer
from paceline.parsing.json_call import envelope_head
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import Reading, Source
from paceline.parsing.tool_call_grammar import CallGrammar
from paceline.parsing.tool_calls.mistral import read_list
from paceline.parsing.tools import Tool

OPEN = "<|tool_call|>"


def read_calls(source: Source, writer: Writer) -> Reading[None]:
    yield from source.skip()
    yield from source.expect("[")
    yield from read_list(source, writer)


MARKERS = Markers(anywhere={OPEN: read_calls})


def calls_grammar(grammar: CallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    calls = [grammar.call(envelope_head(tool.name), tool, "}") for tool in tools]
    return f'{grammar.text(OPEN + "[")} {grammar.listed(calls, ", ", several=several)} "]"'
