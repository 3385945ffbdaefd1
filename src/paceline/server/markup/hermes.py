"""<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen 2.5 and Qwen 3."""

from collections.abc import Sequence

from paceline.server.dialogue.request import Tool
from paceline.server.markup.answer import Markers
from paceline.server.markup.call_grammar import CallGrammar
from paceline.server.markup.envelope import envelope_head, read_envelope
from paceline.server.markup.source import MalformedError, Reading, Source
from paceline.server.markup.writer import Writer

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
