"""<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>: Gemma 4."""

import re

from paceline.parsing.event_sink import EventSink
from paceline.parsing.lenient_json import MAX_DEPTH, escape_json, json_word, read_short_string
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import MalformedError, Parse, TextStream

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"[\w.\-]")
_BARE = re.compile(r"[^,:{}\[\]<>\"]")


def read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    yield from stream.expect("call:")
    name = yield from stream.matching(_NAME)
    if not name or (yield from stream.peek()) != "{":
        raise MalformedError
    stream.mark_emitted()
    with sink.call(name):
        yield from _read_value(stream, sink)
    yield from stream.skip()
    if not (yield from stream.take_or_end(CLOSE)):
        raise MalformedError


def _read_value(stream: TextStream, sink: EventSink) -> Parse[None]:
    """One value with all that stands in it."""
    open_ends: list[str] = []
    while True:
        yield from stream.skip()
        char = yield from stream.peek()
        if char in ("{", "["):
            _tell(stream, sink, char)
            open_ends.append("}" if char == "{" else "]")
            if len(open_ends) > MAX_DEPTH:
                raise MalformedError
            yield from stream.skip()
            if (yield from stream.peek()) != open_ends[-1]:
                if char == "{":
                    yield from _read_key(stream, sink)
                continue
        elif (yield from stream.take(QUOTE)):
            yield from _read_text(stream, sink)
        else:
            yield from _read_bare(stream, sink)
        if not (yield from _has_more(stream, sink, open_ends)):
            return


def _has_more(stream: TextStream, sink: EventSink, open_ends: list[str]) -> Parse[bool]:
    while open_ends:
        yield from stream.skip()
        char = yield from stream.peek()
        if char == ",":
            _tell(stream, sink, ",", ", ")
            if open_ends[-1] == "}":
                yield from _read_key(stream, sink)
            return True
        if char != open_ends[-1]:
            raise MalformedError
        _tell(stream, sink, char)
        open_ends.pop()
    return False


def _read_key(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    if (yield from stream.take(QUOTE)):
        key = yield from stream.until(QUOTE)
    elif (yield from stream.peek()) == '"':
        key = yield from read_short_string(stream)
    else:
        key = (yield from stream.matching(_BARE)).rstrip()
    yield from stream.skip()
    if not key or (yield from stream.peek()) != ":":
        raise MalformedError
    _tell(stream, sink, ":", f'"{escape_json(key)}": ')


def _read_text(stream: TextStream, sink: EventSink) -> Parse[None]:
    """A text, in which nothing is escaped; behind its first mark."""
    stream.mark_emitted()
    sink.arguments('"')
    if (yield from stream.emit_until((QUOTE,), lambda part: sink.arguments(escape_json(part)))) is None:
        raise MalformedError
    stream.at += len(QUOTE)
    stream.mark_emitted()
    sink.arguments('"')


def _read_bare(stream: TextStream, sink: EventSink) -> Parse[None]:
    """A number, true, false or null; other words are texts."""
    if (yield from stream.peek()) == '"':
        text = yield from read_short_string(stream)
        sink.arguments(f'"{escape_json(text)}"')
    else:
        word = (yield from stream.matching(_BARE)).strip()
        if not word or (yield from stream.peek()) == "":
            raise MalformedError
        sink.arguments(json_word(word) or f'"{escape_json(word)}"')
    stream.mark_emitted()


def _tell(stream: TextStream, sink: EventSink, passed: str, told: str | None = None) -> None:
    stream.at += len(passed)
    stream.mark_emitted()
    sink.arguments(passed if told is None else told)


MARKERS = Markers(anywhere={OPEN: read_call})
