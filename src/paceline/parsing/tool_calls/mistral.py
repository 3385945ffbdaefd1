"""[TOOL_CALLS][{"name": …, "arguments": {…}}, …], and as newer models write it: [TOOL_CALLS]name[ARGS]{…}."""

import re
from collections.abc import Sequence

from paceline.parsing.event_sink import EventSink
from paceline.parsing.json_call import json_call_head, read_json_call
from paceline.parsing.lenient_json import emit_json_object
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[\w.\-]")


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    char = yield from stream.peek()
    if char == "[":
        stream.at += 1
        yield from read_list(stream, sink)
    elif char == "{":
        yield from read_json_call(stream, sink)
    else:
        yield from _read_named(stream, sink)


def read_list(stream: TextStream, sink: EventSink) -> Parse[None]:
    """The calls of a list, whose bracket is passed."""
    while True:
        yield from read_json_call(stream, sink)
        stream.mark_emitted()
        yield from stream.skip()
        if not (sink.can_call and (yield from stream.take(","))):
            break
    if not (yield from stream.take_or_end("]")):
        raise MalformedError


def _read_named(stream: TextStream, sink: EventSink) -> Parse[None]:
    name = yield from stream.matching(_NAME)
    if not name:
        raise MalformedError
    if (yield from stream.take(CALL_ID)):
        yield from stream.matching(_NAME)
    yield from stream.take(ARGS)
    yield from stream.skip()
    if (yield from stream.peek()) != "{":
        raise MalformedError
    stream.mark_emitted()
    with sink.call(name):
        yield from emit_json_object(stream, sink.arguments)


MARKERS = Markers(anywhere={OPEN: read_calls})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    if grammar.has(ARGS):
        return grammar.listed([grammar.call(f"{OPEN}{tool.name}{ARGS}", tool) for tool in tools], "", several=several)
    calls = [grammar.call(json_call_head(tool.name), tool, "}") for tool in tools]
    return f'{grammar.text(OPEN + "[")} {grammar.listed(calls, ", ", several=several)} "]"'
