"""<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen 2.5 and Qwen 3."""

from collections.abc import Sequence

from paceline.parsing.event_sink import EventSink
from paceline.parsing.json_call import json_call_head, read_json_call
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from read_json_call(stream, sink)
    yield from stream.skip()
    while sink.can_call and (yield from stream.peek()) == "{":
        yield from read_json_call(stream, sink)
        yield from stream.skip()
    if not (yield from stream.take_or_end(CLOSE)):
        raise MalformedError


MARKERS = Markers(anywhere={OPEN: read_call})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    calls = [grammar.call(f"{OPEN}\n{json_call_head(tool.name)}", tool, "}\n" + CLOSE) for tool in tools]
    return grammar.listed(calls, "\n", several=several)
