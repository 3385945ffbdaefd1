"""<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>: Gemma 4."""

import re

from paceline.parsing.event_sink import Writer
from paceline.parsing.lenient_json import MAX_DEPTH, inside, json_word, short_string
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import MalformedError, Reading, Source

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"[\w.\-]")
_BARE = re.compile(r"[^,:{}\[\]<>\"]")


def read_call(source: Source, writer: Writer) -> Reading[None]:
    yield from source.skip()
    yield from source.expect("call:")
    name = yield from source.matching(_NAME)
    if not name or (yield from source.peek()) != "{":
        raise MalformedError
    source.settle()
    with writer.call(name):
        yield from _read_value(source, writer)
    yield from source.skip()
    if not (yield from source.take_end(CLOSE)):
        raise MalformedError


def _read_value(source: Source, writer: Writer) -> Reading[None]:
    """One value with all that stands in it."""
    open_ends: list[str] = []
    while True:
        yield from source.skip()
        char = yield from source.peek()
        if char in ("{", "["):
            _tell(source, writer, char)
            open_ends.append("}" if char == "{" else "]")
            if len(open_ends) > MAX_DEPTH:
                raise MalformedError
            yield from source.skip()
            if (yield from source.peek()) != open_ends[-1]:
                if char == "{":
                    yield from _read_key(source, writer)
                continue
        elif (yield from source.take(QUOTE)):
            yield from _read_text(source, writer)
        else:
            yield from _read_bare(source, writer)
        if not (yield from _has_more(source, writer, open_ends)):
            return


def _has_more(source: Source, writer: Writer, open_ends: list[str]) -> Reading[bool]:
    while open_ends:
        yield from source.skip()
        char = yield from source.peek()
        if char == ",":
            _tell(source, writer, ",", ", ")
            if open_ends[-1] == "}":
                yield from _read_key(source, writer)
            return True
        if char != open_ends[-1]:
            raise MalformedError
        _tell(source, writer, char)
        open_ends.pop()
    return False


def _read_key(source: Source, writer: Writer) -> Reading[None]:
    yield from source.skip()
    if (yield from source.take(QUOTE)):
        key = yield from source.until(QUOTE)
    elif (yield from source.peek()) == '"':
        key = yield from short_string(source)
    else:
        key = (yield from source.matching(_BARE)).rstrip()
    yield from source.skip()
    if not key or (yield from source.peek()) != ":":
        raise MalformedError
    _tell(source, writer, ":", f'"{inside(key)}": ')


def _read_text(source: Source, writer: Writer) -> Reading[None]:
    """A text, in which nothing is escaped; behind its first mark."""
    source.settle()
    writer.arguments('"')
    if (yield from source.told_until((QUOTE,), lambda part: writer.arguments(inside(part)))) is None:
        raise MalformedError
    source.at += len(QUOTE)
    source.settle()
    writer.arguments('"')


def _read_bare(source: Source, writer: Writer) -> Reading[None]:
    """A number, true, false or null; other words are texts."""
    if (yield from source.peek()) == '"':
        text = yield from short_string(source)
        writer.arguments(f'"{inside(text)}"')
    else:
        word = (yield from source.matching(_BARE)).strip()
        if not word or (yield from source.peek()) == "":
            raise MalformedError
        writer.arguments(json_word(word) or f'"{inside(word)}"')
    source.settle()


def _tell(source: Source, writer: Writer, passed: str, told: str | None = None) -> None:
    source.at += len(passed)
    source.settle()
    writer.arguments(passed if told is None else told)


MARKERS = Markers(anywhere={OPEN: read_call})
