"""<tool_calls><tool_call>name<tool_sep><arg_key>…</arg_key><arg_value>…</arg_value></tool_call></tool_calls>: Hunyuan 3 and 4."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.parsing.argument_types import parameter_schema
from paceline.parsing.argument_value import value_grammar
from paceline.parsing.event_sink import EventSink
from paceline.parsing.json_call_list import take_any
from paceline.parsing.lenient_json import emit_json_object, escape_json
from paceline.parsing.output_parser import Markers
from paceline.parsing.tagged_value import read_tagged_value
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar, arguments_schema
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<tool_calls>", "</tool_calls>"
CALL, SEPARATOR, CALL_END = "<tool_call>", "<tool_sep>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
TOKENS = (OPEN, CLOSE, CALL, SEPARATOR, CALL_END, KEY, KEY_END, VALUE, VALUE_END)


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    yield from stream.take(CALL)
    yield from _read_call(stream, sink)
    while sink.can_call and (yield from stream.take(CALL)):
        yield from _read_call(stream, sink)
    yield from stream.take_or_end(CLOSE)


def _read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    name = (yield from stream.until(SEPARATOR)).strip()
    if not name or not name.isprintable() or "<" in name:
        raise MalformedError
    yield from stream.skip()
    stream.mark_emitted()
    with sink.call(name):
        if (yield from stream.peek()) == "{":
            yield from emit_json_object(stream, sink.arguments)
        else:
            sink.arguments("{")
            try:
                yield from _read_arguments(stream, sink, sink.schema_of(name))
            finally:
                sink.arguments("}")
        stream.mark_emitted()
    yield from stream.skip()
    yield from take_any(stream, (CALL_END,))
    yield from stream.skip()
    stream.mark_emitted()


def _read_arguments(stream: TextStream, sink: EventSink, schema: Mapping[str, Any] | None) -> Parse[None]:
    before = ""
    while (yield from stream.take(KEY)):
        key = (yield from stream.until(KEY_END)).strip()
        yield from stream.skip()
        yield from stream.expect(VALUE)
        sink.arguments(f'{before}"{escape_json(key)}": ')
        before = ", "
        yield from read_tagged_value(stream, sink, parameter_schema(schema, key), VALUE_END, (KEY, CALL_END))
        yield from stream.skip()


def read_bare_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse calls whose outer mark is missing."""
    stream.at -= len(CALL)
    yield from read_calls(stream, sink)


MARKERS = Markers(anywhere={OPEN: read_calls, CALL: read_bare_call})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Build the grammar. Arguments come in the schema's order."""
    calls = [
        f"{grammar.text(f'{CALL}{tool.name}{SEPARATOR}{chr(10)}')} {_arguments(grammar, tool)} {grammar.text(CALL_END)}" for tool in tools
    ]
    body = grammar.listed(calls, "\n", several=several)
    return f"{grammar.text(OPEN + chr(10))} {body} {grammar.text(chr(10) + CLOSE)}"


def _arguments(grammar: ToolCallGrammar, tool: Tool) -> str:
    root = arguments_schema(tool)
    required, parts = root.get("required") or (), []
    for name in root.get("properties") or ():
        opening = grammar.text(f"{KEY}{name}{KEY_END}\n{VALUE}")
        value = value_grammar(grammar, root, parameter_schema(root, name) or {}, VALUE_END)
        one = grammar.rule(f'{opening} {value} "\\n"')
        parts.append(one if name in required else f"{one}?")
    return " ".join(parts)
