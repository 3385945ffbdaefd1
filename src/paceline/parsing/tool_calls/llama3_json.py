"""{"name": …, "parameters": {…}}, all of the answer or behind <|python_tag|>: Llama 3.1 to 3.3; several are separated by semicolons."""

from collections.abc import Sequence

from paceline.parsing.event_sink import EventSink
from paceline.parsing.json_call import json_call_head, read_json_call
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import WHITESPACE, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

PYTHON_TAG = "<|python_tag|>"


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    """One call or several; only tools that the model was told of are called, for an answer may be any JSON."""
    yield from read_json_call(stream, sink, only_known=True)
    stream.mark_emitted()
    while sink.can_call:
        yield from stream.skip(WHITESPACE + ";")
        if (yield from stream.peek()) != "{":
            return
        yield from read_json_call(stream, sink, only_known=True)
        stream.mark_emitted()


def read_bare_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    stream.at -= 1
    yield from read_calls(stream, sink)


MARKERS = Markers(anywhere={PYTHON_TAG: read_calls}, first={"{": read_bare_calls})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    calls = [grammar.call(json_call_head(tool.name, "parameters"), tool, "}") for tool in tools]
    return grammar.listed(calls, "; ", several=several)
