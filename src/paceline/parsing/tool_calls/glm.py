"""<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>, with line ends or without: GLM 4.5 to 4.7."""

import re
from collections.abc import Sequence

from paceline.parsing.argument_types import parameter_schema
from paceline.parsing.argument_value import read_value, value_grammar
from paceline.parsing.event_sink import EventSink
from paceline.parsing.lenient_json import escape_json
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar, arguments_schema
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
TOKENS = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
_NAME = re.compile(r"[\w.\-]")
_LINE_END = '"\\n"?'


def read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    """One call; its name must be a tool's, for it may be any word."""
    yield from stream.skip()
    name = yield from stream.matching(_NAME)
    if name not in sink.tool_names:
        raise MalformedError
    yield from stream.skip()
    if (yield from stream.one_of((KEY, CLOSE))) is None:
        raise MalformedError
    stream.mark_emitted()
    with sink.call(name):
        sink.arguments("{")
        before = ""
        while (yield from stream.take(KEY)):
            key = yield from stream.until(KEY_END)
            yield from stream.skip()
            yield from stream.expect(VALUE)
            sink.arguments(f'{before}"{escape_json(key)}": ')
            yield from read_value(stream, sink, parameter_schema(sink.schema_of(name), key), (VALUE_END,))
            yield from stream.skip()
            before = ", "
        if not (yield from stream.take_or_end(CLOSE)):
            raise MalformedError
        sink.arguments("}")
        stream.mark_emitted()


MARKERS = Markers(anywhere={OPEN: read_call})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Arguments come in the schema's order; texts are held to their `enum` alone."""
    calls = [f"{grammar.text(OPEN + tool.name)} {_LINE_END} {_arguments(grammar, tool)} {grammar.text(CLOSE)}" for tool in tools]
    return grammar.listed(calls, "\n", several=several)


def _arguments(grammar: ToolCallGrammar, tool: Tool) -> str:
    root = arguments_schema(tool)
    required, parts = root.get("required") or (), []
    for name in root.get("properties") or ():
        key = f"{grammar.text(f'{KEY}{name}{KEY_END}')} {_LINE_END} {grammar.text(VALUE)}"
        value = value_grammar(grammar, root, parameter_schema(root, name) or {}, VALUE_END)
        one = grammar.rule(f"{key} {value} {_LINE_END}")
        parts.append(one if name in required else f"{one}?")
    return " ".join(parts)
