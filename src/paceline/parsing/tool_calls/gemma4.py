"""<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>: Gemma 4."""

import re

from paceline.parsing.end_mark import pass_end_mark, skip_repeated_mark
from paceline.parsing.event_sink import EventSink
from paceline.parsing.json_call import skip_closers
from paceline.parsing.lenient_json import RawQuotes, emit_json_object
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import WHITESPACE, MalformedError, Parse, TextStream

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CALL, _RESPONSE = "call:", "<|tool_response>"
_QUOTES = RawQuotes(QUOTE, OPEN, CLOSE)
_NAME = re.compile(r"[\w.\-]")


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse the calls of a block after one or more opening marks."""
    yield from skip_repeated_mark(stream, OPEN)
    if sink.num_calls and (yield from stream.peek()) == "":  # an opening mark where a closing one should be
        return
    yield from stream.take(_CALL)
    yield from _read_call(stream, sink)
    while sink.can_call:
        yield from stream.skip(WHITESPACE + ",;")
        if not (yield from stream.take(_CALL)):
            break
        yield from _read_call(stream, sink)
    yield from pass_end_mark(stream, CLOSE)
    yield from stream.take_or_end(_RESPONSE)


def _read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    name = yield from stream.matching(_NAME)
    yield from stream.skip()
    if not name or (yield from stream.peek()) != "{":
        raise MalformedError
    stream.mark_emitted()
    with sink.call(name):
        yield from emit_json_object(stream, sink.arguments, raw=_QUOTES)
    yield from skip_closers(stream)
    while (yield from stream.take(QUOTE)):
        yield from skip_closers(stream)


MARKERS = Markers(anywhere={OPEN: read_calls})
