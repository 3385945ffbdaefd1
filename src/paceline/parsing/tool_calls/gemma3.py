"""Python fenced as tool_code, JSON fenced as json, or a bare list: Gemma 3."""

from collections.abc import Sequence

from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.output_parser import Markers
from paceline.parsing.python_calls import CallListReader
from paceline.parsing.schema_grammar import python_call_grammar
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tool_calls.llama3_json import read_bare_calls, read_calls
from paceline.parsing.tool_calls.pythonic import read_list
from paceline.parsing.tools import Tool

FENCE = "```"
TOOL_CODE, PYTHON, JSON = f"{FENCE}tool_code", f"{FENCE}python", f"{FENCE}json"
_READER = CallListReader((FENCE,), only_known=True, is_code=True)


def read_json_fence(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from read_calls(stream, sink)
    if not (yield from stream.take_or_end(FENCE)):
        raise MalformedError


MARKERS = Markers(
    anywhere={TOOL_CODE: _READER.read, PYTHON: _READER.read, JSON: read_json_fence}, first={"[": read_list, "{": read_bare_calls}
)


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    calls = [python_call_grammar(grammar, tool) for tool in tools]
    newline = "\n"
    return f"{grammar.literal(TOOL_CODE + newline)} {grammar.listed(calls, newline, several=several)} {grammar.literal(newline + FENCE)}"


FORMAT = ToolCallFormat(MARKERS, (TOOL_CODE,), (), calls_grammar)
