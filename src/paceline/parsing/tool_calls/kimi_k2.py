"""Calls in a section, each with an id that holds the tool's name, functions.name:0, then its arguments: Kimi-K2."""

import re
from collections.abc import Sequence

from paceline.parsing.event_sink import Writer
from paceline.parsing.lenient_json import json_object
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import MalformedError, Reading, Source
from paceline.parsing.tool_call_grammar import CallGrammar
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
TOKENS = (OPEN, CLOSE, CALL, ARGUMENTS, CALL_END)
_ID = re.compile(r"(?:functions\.)?([\w.\-]+):[0-9]+")


def read_calls(source: Source, writer: Writer) -> Reading[None]:
    yield from source.skip()
    yield from source.expect(CALL)
    yield from _read_call(source, writer)
    while writer.may_call and (yield from source.take(CALL)):
        yield from _read_call(source, writer)
    if not (yield from source.take_end(CLOSE)):
        raise MalformedError


def _read_call(source: Source, writer: Writer) -> Reading[None]:
    """The id is kept: the chat template writes it again, and the model reads the name in it."""
    call_id = (yield from source.until(ARGUMENTS)).strip()
    found = _ID.fullmatch(call_id)
    yield from source.skip()
    if found is None or (yield from source.peek()) != "{":
        raise MalformedError
    source.settle()
    with writer.call(found[1], call_id):
        yield from json_object(source, writer.arguments)
        yield from source.skip()
        if not (yield from source.take_end(CALL_END)):
            raise MalformedError
        source.settle()
    yield from source.skip()


MARKERS = Markers(anywhere={OPEN: read_calls})


def calls_grammar(grammar: CallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    calls = [f"{grammar.text(f'{CALL}functions.{tool.name}:')} /[0-9]{{1,3}}/ {grammar.call(ARGUMENTS, tool, CALL_END)}" for tool in tools]
    return f"{grammar.text(OPEN)} {grammar.listed(calls, '', several=several)} {grammar.text(CLOSE)}"
