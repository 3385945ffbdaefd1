"""[TOOL_CALLS][{"name": …, "arguments": {…}}, …], and as newer models write it: [TOOL_CALLS]name[ARGS]{…}."""

import re
from collections.abc import Sequence

from paceline.parsing.event_sink import Writer
from paceline.parsing.json_call import envelope_head, read_envelope
from paceline.parsing.lenient_json import json_object
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import MalformedError, Reading, Source
from paceline.parsing.tool_call_grammar import CallGrammar
from paceline.parsing.tools import Tool

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[\w.\-]")


def read_calls(source: Source, writer: Writer) -> Reading[None]:
    yield from source.skip()
    char = yield from source.peek()
    if char == "[":
        source.at += 1
        yield from read_list(source, writer)
    elif char == "{":
        yield from read_envelope(source, writer)
    else:
        yield from _read_named(source, writer)


def read_list(source: Source, writer: Writer) -> Reading[None]:
    """The calls of a list, whose bracket is passed."""
    while True:
        yield from read_envelope(source, writer)
        source.settle()
        yield from source.skip()
        if not (writer.may_call and (yield from source.take(","))):
            break
    if not (yield from source.take_end("]")):
        raise MalformedError


def _read_named(source: Source, writer: Writer) -> Reading[None]:
    name = yield from source.matching(_NAME)
    if not name:
        raise MalformedError
    if (yield from source.take(CALL_ID)):
        yield from source.matching(_NAME)
    yield from source.take(ARGS)
    yield from source.skip()
    if (yield from source.peek()) != "{":
        raise MalformedError
    source.settle()
    with writer.call(name):
        yield from json_object(source, writer.arguments)


MARKERS = Markers(anywhere={OPEN: read_calls})


def calls_grammar(grammar: CallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    if grammar.has(ARGS):
        return grammar.listed([grammar.call(f"{OPEN}{tool.name}{ARGS}", tool) for tool in tools], "", several=several)
    calls = [grammar.call(envelope_head(tool.name), tool, "}") for tool in tools]
    return f'{grammar.text(OPEN + "[")} {grammar.listed(calls, ", ", several=several)} "]"'
