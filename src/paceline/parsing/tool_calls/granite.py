"""<|tool_call|>[{"name": …, "arguments": {…}}, …]: Granite 3.1 to 3.3."""

from collections.abc import Sequence

from paceline.parsing.end_mark import skip_repeated_mark
from paceline.parsing.event_sink import EventSink
from paceline.parsing.json_call import json_call_head, read_json_calls
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

OPEN = "<|tool_call|>"


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse the list, or the call, that follows one or more opening marks."""
    yield from skip_repeated_mark(stream, OPEN)
    yield from read_json_calls(stream, sink)


MARKERS = Markers(anywhere={OPEN: read_calls})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    calls = [grammar.call(json_call_head(tool.name), tool, "}") for tool in tools]
    return f'{grammar.text(OPEN + "[")} {grammar.listed(calls, ", ", several=several)} "]"'
