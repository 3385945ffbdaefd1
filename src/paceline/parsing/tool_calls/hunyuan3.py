"""<tool_calls><tool_call>name<tool_sep><arg_key>…</arg_key><arg_value>…</arg_value></tool_call></tool_calls>: Hunyuan 3.

Hunyuan 4 leaves out <tool_sep> and the line ends.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.parsing.argument_types import parameter_schema
from paceline.parsing.argument_value import value_grammar
from paceline.parsing.closed_value import read_closed_value
from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.json_call_list import take_any
from paceline.parsing.lenient_json import emit_json_object, escape_json
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar, arguments_schema
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<tool_calls>", "</tool_calls>"
CALL, SEPARATOR, CALL_END = "<tool_call>", "<tool_sep>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
TOKENS = (OPEN, CLOSE, CALL, SEPARATOR, CALL_END, KEY, KEY_END, VALUE, VALUE_END)
_NAME = re.compile(r"[\w.\-]")
_LINE_END = '"\\n"?'


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    yield from stream.take(CALL)
    yield from _read_call(stream, sink)
    while sink.can_call and (yield from stream.take(CALL)):
        yield from _read_call(stream, sink)
    yield from stream.take_or_end(CLOSE)


def _read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    name = yield from stream.matching(_NAME)
    yield from stream.skip()
    has_separator = yield from stream.take(SEPARATOR)
    yield from stream.skip()
    if not name or not (has_separator or (sink.knows(name) and (yield from stream.one_of((KEY, CALL_END))))):
        raise MalformedError
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
        head = f'{before}"{escape_json(key)}": '
        yield from read_closed_value(stream, sink, head, parameter_schema(schema, key), VALUE_END, (KEY, CALL_END))
        before = ", "
        yield from stream.skip()


def read_bare_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse calls whose outer mark is missing."""
    stream.at -= len(CALL)
    yield from read_calls(stream, sink)


MARKERS = Markers(anywhere={OPEN: read_calls, CALL: read_bare_call})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Build the grammar. Arguments come in the schema's order."""
    separator = "" if grammar.has(KEY) and not grammar.has(SEPARATOR) else SEPARATOR
    heads = [grammar.text(f"{CALL}{tool.name}{separator}") for tool in tools]
    end = f"{grammar.text(CALL_END)} {_LINE_END}"
    calls = [f"{head} {_LINE_END} {_arguments(grammar, tool)} {end}" for head, tool in zip(heads, tools, strict=True)]
    return f"{grammar.text(OPEN)} {_LINE_END} {grammar.listed(calls, '', several=several)} {grammar.text(CLOSE)}"


def _arguments(grammar: ToolCallGrammar, tool: Tool) -> str:
    root = arguments_schema(tool)
    required, parts = root.get("required") or (), []
    for name in root.get("properties") or ():
        key = f"{grammar.text(f'{KEY}{name}{KEY_END}')} {_LINE_END} {grammar.text(VALUE)}"
        value = value_grammar(grammar, root, parameter_schema(root, name) or {}, VALUE_END)
        one = grammar.rule(f"{key} {value} {_LINE_END}")
        parts.append(one if name in required else f"{one}?")
    return " ".join(parts)


FORMAT = ToolCallFormat(MARKERS, (OPEN, KEY), TOKENS, calls_grammar, OPEN)
