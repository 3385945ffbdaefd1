"""<start_function_call>call:f{city:<escape>Paris<escape>,days:3}<end_function_call>: FunctionGemma."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from paceline.parsing.argument_types import coerce_argument, parameter_schema, resolve_ref
from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.json_writer import HeldCall, JsonWriter
from paceline.parsing.lenient_json import MAX_DEPTH, escape_json, json_word, read_short_string
from paceline.parsing.output_parser import Markers
from paceline.parsing.python_literals import admits_text
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar, arguments_schema
from paceline.parsing.tools import Tool

OPEN, CLOSE, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
_NAME = re.compile(r"[\w.\-]")
_BARE = re.compile(r"[^,:{}\[\]<>\"]")
_UP_TO_MARK = re.compile(r".[^<]*", re.DOTALL)
_MAX_GRAMMAR_DEPTH = 8  # schemas that contain themselves are followed so far


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
        writer = JsonWriter(call.emit)
        try:
            yield from _read_object(stream, writer, sink.schema_of(call.name), 0)
        except MalformedError:
            if call.is_open or (stream.has_ended and stream.at == len(stream.text)):
                call.open()
                sink.arguments(writer.missing_end)
            raise
        call.open()
    yield from stream.skip()
    if not (yield from stream.take_or_end(CLOSE)):
        raise MalformedError


def _read_object(stream: TextStream, writer: JsonWriter, schema: Mapping[str, Any] | None, depth: int) -> Parse[None]:
    if depth > MAX_DEPTH // 2:
        raise MalformedError
    stream.at += 1
    writer.open("{", "}")
    before = ""
    while True:
        yield from stream.skip()
        if (yield from stream.take("}")) or (before and (yield from stream.one_of((CLOSE,))) is not None):
            break
        key = yield from _read_key(stream)
        writer.put(f'{before}"{escape_json(key)}": ')
        yield from _read_value(stream, writer, parameter_schema(schema, key), depth)
        before = ", "
        yield from stream.skip()
        yield from stream.take(",")
    writer.close()


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


def _read_value(stream: TextStream, writer: JsonWriter, schema: Mapping[str, Any] | None, depth: int) -> Parse[None]:
    yield from stream.skip()
    char = yield from stream.peek()
    if char == "{":
        yield from _read_object(stream, writer, schema, depth + 1)
    elif char == "[":
        yield from _read_list(stream, writer, depth + 1)
    elif (yield from stream.take(QUOTE)):
        yield from _read_text(stream, writer, schema)
    elif char == '"':
        text = yield from read_short_string(stream)
        writer.emit(f'"{escape_json(text)}"')
    else:
        word = (yield from stream.matching(_BARE)).strip()
        if not word or (yield from stream.peek()) == "":
            raise MalformedError
        is_plain = schema is None or not admits_text(schema)
        writer.emit((json_word(word) if is_plain else None) or coerce_argument(word, schema))


def _read_list(stream: TextStream, writer: JsonWriter, depth: int) -> Parse[None]:
    if depth > MAX_DEPTH // 2:
        raise MalformedError
    stream.at += 1
    writer.open("[", "]")
    before = ""
    while True:
        yield from stream.skip()
        if (yield from stream.take("]")):
            break
        writer.put(before)
        yield from _read_value(stream, writer, None, depth)
        before = ", "
        yield from stream.skip()
        yield from stream.take(",")
    writer.close()


def _read_text(stream: TextStream, writer: JsonWriter, schema: Mapping[str, Any] | None) -> Parse[None]:
    """Read a text up to the next mark; nothing in it is escaped. Where the schema allows no text, it is the text of another value."""
    parts: list[str] = []
    streams = schema is None or admits_text(schema)
    if streams:
        writer.open('"', '"')
    while not (yield from stream.take(QUOTE)) and (yield from stream.one_of((CLOSE,))) is None:
        if (yield from stream.peek()) == "":
            raise MalformedError
        found = _UP_TO_MARK.match(stream.text, stream.at)
        assert found is not None
        stream.at = found.end()
        if streams:
            writer.emit(escape_json(found[0]))
        else:
            parts.append(found[0])
    if streams:
        writer.close()
    else:
        writer.emit(coerce_argument("".join(parts), schema))


MARKERS = Markers(anywhere={OPEN: read_call})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Return a grammar of calls with properties in the schema's order. Of texts only their `enum` is enforced, of lists no length."""
    calls = []
    for tool in tools:
        schema = arguments_schema(tool)
        calls.append(f"{grammar.text(f'{OPEN}call:{tool.name}')} {_value_rule(grammar, schema, schema, 0)} {grammar.text(CLOSE)}")
    return grammar.listed(calls, "", several=several)


def _value_rule(grammar: ToolCallGrammar, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
    schema = resolve_ref(schema, root)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        marked = [f"{QUOTE}{value}{QUOTE}" if isinstance(value, str) else json.dumps(value) for value in values]
        return grammar.one_of([grammar.text(value) for value in marked])
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list) and options:
        return grammar.one_of([_value_rule(grammar, option, root, depth) for option in options if isinstance(option, Mapping)])
    types = schema.get("type") or ["string", "number", "boolean", "null"]
    return grammar.one_of([_typed_rule(grammar, name, schema, root, depth) for name in ([types] if isinstance(types, str) else types)])


def _typed_rule(grammar: ToolCallGrammar, name: str, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
    if name in ("integer", "number", "boolean", "null"):  # as in JSON
        return grammar.json({**schema, "type": name})
    if name == "array" and depth < _MAX_GRAMMAR_DEPTH:
        items = schema.get("items")
        item = grammar.rule(_value_rule(grammar, items if isinstance(items, Mapping) else {}, root, depth + 1))
        return grammar.rule(f'"[" ({item} ("," {item})*)? "]"')
    if name == "object" and depth < _MAX_GRAMMAR_DEPTH:
        return _object_rule(grammar, schema, root, depth)
    return f"{grammar.text(QUOTE)} {grammar.until(QUOTE)}"


def _object_rule(grammar: ToolCallGrammar, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
    """Return a rule for properties in order, built from the last one to the first, because each rule names the next."""
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    first = following = '""'
    for name in reversed(list(properties)):
        value = grammar.rule(f"{grammar.text(f'{name}:')} {_value_rule(grammar, properties[name], root, depth + 1)}")
        is_required = name in required
        first = grammar.rule(f"{value} {following}" + ("" if is_required else f" | {first}"))
        following = grammar.rule(f'"," {value} {following}' if is_required else f'("," {value})? {following}')
    return f'"{{" {first} "}}"'


FORMAT = ToolCallFormat(MARKERS, (OPEN,), (OPEN, CLOSE, QUOTE), calls_grammar, OPEN)
