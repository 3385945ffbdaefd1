"""Calls in a section, each with an id that holds the tool's name, functions.name:0, then its arguments: Kimi-K2."""

import re
from collections.abc import Sequence

from paceline.parsing.event_sink import EventSink
from paceline.parsing.lenient_json import emit_json_object
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
TOKENS = (OPEN, CLOSE, CALL, ARGUMENTS, CALL_END)
_ID = re.compile(r"(?:functions\.)?([\w.\-]+):[0-9]+")


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    yield from stream.expect(CALL)
    yield from _read_call(stream, sink)
    while sink.can_call and (yield from stream.take(CALL)):
        yield from _read_call(stream, sink)
    if not (yield from stream.take_or_end(CLOSE)):
        raise MalformedError


def _read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    """The id is kept: the chat template writes it again, and the model reads the name in it."""
    call_id = (yield from stream.until(ARGUMENTS)).strip()
    found = _ID.fullmatch(call_id)
    yield from stream.skip()
    if found is None or (yield from stream.peek()) != "{":
        raise MalformedError
    stream.mark_emitted()
    with sink.call(found[1], call_id):
        yield from emit_json_object(stream, sink.arguments)
        yield from stream.skip()
        if not (yield from stream.take_or_end(CALL_END)):
            raise MalformedError
        stream.mark_emitted()
    yield from stream.skip()


MARKERS = Markers(anywhere={OPEN: read_calls})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    calls = [f"{grammar.text(f'{CALL}functions.{tool.name}:')} /[0-9]{{1,3}}/ {grammar.call(ARGUMENTS, tool, CALL_END)}" for tool in tools]
    return f"{grammar.text(OPEN)} {grammar.listed(calls, '', several=several)} {grammar.text(CLOSE)}"
