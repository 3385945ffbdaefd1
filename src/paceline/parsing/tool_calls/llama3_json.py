"""{"name": …, "parameters": {…}}, alone or after <|python_tag|>, separated by semicolons: Llama 3.1 to 3.3."""

from collections.abc import Sequence

from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.json_call import json_call_head, read_json_calls
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

PYTHON_TAG = "<|python_tag|>"


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse one call or several, of tools that the model was shown only, because an answer may be any JSON."""
    yield from read_json_calls(stream, sink, only_known=True)


def read_bare_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse calls that begin with the character before."""
    stream.at -= 1
    yield from read_calls(stream, sink)


BARE = dict.fromkeys("{[`", read_bare_calls)
MARKERS = Markers(anywhere={PYTHON_TAG: read_calls}, first=BARE)


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    calls = [grammar.call(json_call_head(tool.name, "parameters"), tool, "}") for tool in tools]
    return grammar.listed(calls, "; ", several=several)


FORMAT = ToolCallFormat(MARKERS, ("<|start_header_id|>", '"parameters"'), (PYTHON_TAG,), calls_grammar)
