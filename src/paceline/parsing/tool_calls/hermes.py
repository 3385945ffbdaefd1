"""<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen 2.5 and Qwen 3."""

from collections.abc import Sequence

from paceline.parsing.event_sink import Writer
from paceline.parsing.json_call import envelope_head, read_envelope
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import MalformedError, Reading, Source
from paceline.parsing.tool_call_grammar import CallGrammar
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read_call(source: Source, writer: Writer) -> Reading[None]:
    yield from read_envelope(source, writer)
    yield from source.skip()
    while writer.may_call and (yield from source.peek()) == "{":
        yield from read_envelope(source, writer)
        yield from source.skip()
    if not (yield from source.take_end(CLOSE)):
        raise MalformedError


MARKERS = Markers(anywhere={OPEN: read_call})


def calls_grammar(grammar: CallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    calls = [grammar.call(f"{OPEN}\n{envelope_head(tool.name)}", tool, "}\n" + CLOSE) for tool in tools]
    return grammar.listed(calls, "\n", several=several)
