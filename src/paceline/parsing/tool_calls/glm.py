"""<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>, with line ends or without: GLM 4.5 to 4.7."""

import re
from collections.abc import Mapping, Sequence

from paceline.parsing.argument_types import parameter_schema, resolve_ref
from paceline.parsing.argument_value import value_grammar
from paceline.parsing.end_mark import pass_end_mark, skip_repeated_mark
from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.lenient_json import escape_json
from paceline.parsing.output_parser import Markers
from paceline.parsing.tagged_values import TaggedValues, ValueTags
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar, arguments_schema
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
TOKENS = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
_NAME = re.compile(r"[\w.\-]")
_KEY = re.compile(r"[^<]")
_TAGS = ValueTags(KEY, VALUE_END, "", (CLOSE,), block_opening=OPEN)
_LINE_END = '"\\n"?'


def read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse a call after one or more opening marks. Without arguments its name must be a tool's, because it may be any word."""
    yield from skip_repeated_mark(stream, OPEN)
    if sink.num_calls and (yield from stream.peek()) == "":  # an opening mark where a closing one should be
        return
    name = yield from stream.matching(_NAME)
    yield from stream.skip()
    following = yield from stream.one_of((KEY, CLOSE))
    if not name or (not sink.knows(name) and following != KEY) or (following is None and (yield from stream.peek()) != ""):
        raise MalformedError
    stream.mark_emitted()
    with sink.call(name):
        sink.arguments("{")
        values, before = TaggedValues.of(stream, sink, _TAGS), ""
        while (yield from stream.take(KEY)):
            begin, key = stream.position, (yield from _read_key(stream))
            sink.arguments(f'{before}"{escape_json(key)}": ')
            yield from values.read(parameter_schema(sink.schema_of(name), key), begin)
            before = ", "
            yield from stream.skip()
            while (yield from stream.take(VALUE_END)):
                yield from stream.skip()
        stream.mark_emitted()
    yield from pass_end_mark(stream, CLOSE)


def _read_key(stream: TextStream) -> Parse[str]:
    """Pass a key up to its value; the key's closing tag and the value's opening tag may be missing."""
    key = yield from stream.matching(_KEY)
    while (yield from stream.one_of((KEY_END, VALUE, VALUE_END, KEY, CLOSE))) is None and (yield from stream.take("<")):
        key += "<" + (yield from stream.matching(_KEY))
    yield from stream.take(KEY_END)
    yield from stream.skip()
    yield from stream.take(VALUE)
    return key.strip()


MARKERS = Markers(anywhere={OPEN: read_call})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Return a grammar of calls with arguments in the schema's order. Of texts only their `enum` is enforced."""
    calls = [f"{grammar.text(OPEN + tool.name)} {_LINE_END} {_arguments(grammar, tool)} {grammar.text(CLOSE)}" for tool in tools]
    return grammar.listed(calls, "\n", several=several)


def _arguments(grammar: ToolCallGrammar, tool: Tool) -> str:
    root = arguments_schema(tool)
    required, parts = root.get("required") or (), []
    for name, property_schema in (root.get("properties") or {}).items():
        key = f"{grammar.text(f'{KEY}{name}{KEY_END}')} {_LINE_END} {grammar.text(VALUE)}"
        schema = resolve_ref(property_schema, root) if isinstance(property_schema, Mapping) else {}
        value = value_grammar(grammar, root, schema, VALUE_END)
        one = grammar.rule(f"{key} {value} {_LINE_END}")
        parts.append(one if name in required else f"{one}?")
    return " ".join(parts)


FORMAT = ToolCallFormat(MARKERS, (OPEN, KEY), TOKENS, calls_grammar, OPEN)
