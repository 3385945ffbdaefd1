"""<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen 2.5 and Qwen 3."""

from paceline.server.markup.answer import Markers
from paceline.server.markup.envelope import read_envelope
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
