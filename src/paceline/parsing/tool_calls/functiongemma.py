"""<start_function_call>call:f{city:<escape>Paris<escape>,days:3}<end_function_call>: FunctionGemma."""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from paceline.parsing.argument_types import admits_text, coerce_argument, parameter_schema
from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import ToolCallFormat, call_list
from paceline.parsing.held_call import HeldCall
from paceline.parsing.lenient_json import MAX_DEPTH, escape_json, json_word, read_short_string
from paceline.parsing.output_parser import Markers
from paceline.parsing.schema_grammar import quoted_object_grammar
from paceline.parsing.text_stream import Emit, MalformedError, Parse, TextStream

OPEN, CLOSE, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
_NAME = re.compile(r"[\w.\-]")
_BARE = re.compile(r"[^,:{}\[\]<>\"]")
_UP_TO_MARK = re.compile(r".[^<]*", re.DOTALL)


def read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    yield from stream.take("call:")
    yield from stream.skip()
    with ExitStack() as stack:
        call = HeldCall(stream, sink, stack)
        call.name = yield from stream.matching(_NAME)
        yield from stream.skip()
        if not call.name or (yield from stream.peek()) != "{":
            raise MalformedError
        try:
            yield from _read_object(stream, call.emit, sink.schema_of(call.name), 0)
        except MalformedError:
            if call.is_open or (stream.has_ended and stream.at == len(stream.text)):
                call.open()
            raise
        call.open()
    yield from stream.skip()
    if not (yield from stream.take_or_end(CLOSE)):
        raise MalformedError


def _read_object(stream: TextStream, emit: Emit, schema: Mapping[str, Any] | None, depth: int) -> Parse[None]:
    if depth > MAX_DEPTH // 2:
        raise MalformedError
    stream.at += 1
    emit("{")
    before = ""
    while True:
        yield from stream.skip()
        if (yield from stream.take("}")) or (before and (yield from stream.one_of((CLOSE,))) is not None):
            break
        key = yield from _read_key(stream)
        emit(f'{before}"{escape_json(key)}": ')
        yield from _read_value(stream, emit, parameter_schema(schema, key), depth)
        before = ", "
        yield from stream.skip()
        yield from stream.take(",")
    emit("}")


def _read_key(stream: TextStream) -> Parse[str]:
    if (yield from stream.take(QUOTE)):
        key = yield from stream.until(QUOTE)
    elif (yield from stream.peek()) == '"':
        key = yield from read_short_string(stream)
    else:
        key = (yield from stream.matching(_BARE)).strip()
    yield from stream.skip()
    if not key or not (yield from stream.take(":")):
        raise MalformedError
    return key


def _read_value(stream: TextStream, emit: Emit, schema: Mapping[str, Any] | None, depth: int) -> Parse[None]:
    yield from stream.skip()
    char = yield from stream.peek()
    if char == "{":
        yield from _read_object(stream, emit, schema, depth + 1)
    elif char == "[":
        yield from _read_list(stream, emit, depth + 1)
    elif (yield from stream.take(QUOTE)):
        yield from _read_text(stream, emit, schema)
    elif char == '"':
        text = yield from read_short_string(stream)
        emit(f'"{escape_json(text)}"')
    else:
        word = (yield from stream.matching(_BARE)).strip()
        if not word or (yield from stream.peek()) == "":
            raise MalformedError
        is_plain = schema is None or not admits_text(schema)
        emit((json_word(word) if is_plain else None) or coerce_argument(word, schema))


def _read_list(stream: TextStream, emit: Emit, depth: int) -> Parse[None]:
    if depth > MAX_DEPTH // 2:
        raise MalformedError
    stream.at += 1
    emit("[")
    before = ""
    while True:
        yield from stream.skip()
        if (yield from stream.take("]")):
            break
        emit(before)
        yield from _read_value(stream, emit, None, depth)
        before = ", "
        yield from stream.skip()
        yield from stream.take(",")
    emit("]")


def _read_text(stream: TextStream, emit: Emit, schema: Mapping[str, Any] | None) -> Parse[None]:
    """Read a text up to the next mark; nothing in it is escaped. Where the schema allows no text, it is the text of another value."""
    parts: list[str] = []
    streams = schema is None or admits_text(schema)
    if streams:
        emit('"')
    while not (yield from stream.take(QUOTE)) and (yield from stream.one_of((CLOSE,))) is None:
        if (yield from stream.peek()) == "":
            raise MalformedError
        found = _UP_TO_MARK.match(stream.text, stream.at)
        assert found is not None
        stream.at = found.end()
        if streams:
            emit(escape_json(found[0]))
        else:
            parts.append(found[0])
    if streams:
        emit('"')
    else:
        emit(coerce_argument("".join(parts), schema))


MARKERS = Markers(anywhere={OPEN: read_call})
calls_grammar = call_list(
    lambda grammar, tool: " ".join(
        (grammar.literal(f"{OPEN}call:{tool.name}"), quoted_object_grammar(grammar, tool, QUOTE), grammar.literal(CLOSE))
    )
)
FORMAT = ToolCallFormat(MARKERS, (OPEN,), (OPEN, CLOSE, QUOTE), calls_grammar, OPEN)
