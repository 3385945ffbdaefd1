"""<tool_call><invoke name="f"><key>value</key></invoke></tool_call>, with a mark before each tag: MiniMax-M3.

Objects and lists are elements within elements; an entry of a list is an <item>. Reasoning is between <mm:think> and </mm:think>; an
answer without reasoning begins with </mm:think>.
"""

import re
from collections.abc import Mapping
from typing import Any

from paceline.parsing.argument_types import admits_text, coerce_argument, parameter_schema, resolve_ref
from paceline.parsing.events import EventSink
from paceline.parsing.formats import ToolCallFormat, call_list
from paceline.parsing.lenient_json import MAX_DEPTH, escape_json
from paceline.parsing.reasoning import reasoning_format
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar, arguments_schema, value_grammar
from paceline.parsing.tools import Tool

MARK = "]<]minimax[>["
OPEN, CLOSE = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
INVOKE, INVOKE_END, ITEM = f'{MARK}<invoke name="', f"{MARK}</invoke>", "item"
THINK = ("<mm:think>", "</mm:think>")
_TAG, _END_TAG = f"{MARK}<", f"{MARK}</"
_KEY = re.compile(r"[^<>\s/]")
_MAX_GRAMMAR_DEPTH = 8  # schemas that contain themselves are followed so far


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    yield from stream.expect(INVOKE)
    yield from _read_invoke(stream, sink)
    while sink.can_call and (yield from stream.take(INVOKE)):
        yield from _read_invoke(stream, sink)
    yield from stream.pass_end_mark(CLOSE)


def _read_invoke(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse one call, from the name in its tag on."""
    name = yield from stream.until('">')
    if not name or not name.isprintable():
        raise MalformedError
    stream.mark_emitted()
    with sink.call(name):
        sink.arguments("{")
        yield from _read_elements(stream, sink, sink.schema_of(name), 0)
        sink.arguments("}")
        yield from stream.take_or_end(INVOKE_END)
        stream.mark_emitted()
    yield from stream.skip()


def _read_elements(stream: TextStream, sink: EventSink, schema: Mapping[str, Any] | None, depth: int, only: str = "") -> Parse[None]:
    """Parse XML elements as the properties of an object; with `only`, as the items of a list."""
    if depth > MAX_DEPTH // 2:
        raise MalformedError
    before = ""
    while True:
        yield from stream.skip()
        if (yield from stream.one_of((_END_TAG, _TAG))) != _TAG:
            return
        stream.at += len(_TAG)
        key = yield from stream.matching(_KEY)
        if not key or (only and key != only) or not (yield from stream.take(">")):
            raise MalformedError
        sink.arguments(before if only else f'{before}"{escape_json(key)}": ')
        before = ", "
        items = (schema or {}).get("items")
        one = (items if isinstance(items, Mapping) else None) if only else parameter_schema(schema, key)
        yield from _read_value(stream, sink, one, f"{_END_TAG}{key}>", depth)


def _read_value(stream: TextStream, sink: EventSink, schema: Mapping[str, Any] | None, end: str, depth: int) -> Parse[None]:
    """Parse a value and `end`. Elements are text where the schema allows a text."""
    stream.mark_emitted()
    following = yield from stream.one_of((_END_TAG, _TAG))
    if following == _TAG and not (schema and admits_text(schema)):
        is_list = (yield from stream.one_of((f"{_TAG}{ITEM}>",))) is not None
        sink.arguments("[" if is_list else "{")
        option = _option(schema, "items" if is_list else "properties")
        yield from _read_elements(stream, sink, option, depth + 1, ITEM if is_list else "")
        sink.arguments("]" if is_list else "}")
        yield from stream.expect(end)
    else:
        parts: list[str] = []
        found = yield from stream.emit_until((end, INVOKE_END, CLOSE), parts.append)
        stream.at += len(end) if found == end else 0
        sink.arguments(coerce_argument("".join(parts), schema))
    stream.mark_emitted()


def _option(schema: Mapping[str, Any] | None, keyword: str) -> Mapping[str, Any] | None:
    """Return the schema itself, or the first of its options that has a keyword."""
    options = (schema or {}).get("anyOf") or (schema or {}).get("oneOf") or ()
    return next((option for option in options if isinstance(option, Mapping) and keyword in option), schema)


def call_grammar(grammar: ToolCallGrammar, tool: Tool) -> str:
    """Return a grammar of a call with parameters in the schema's order. Of texts only their `enum` is enforced, of lists no length."""
    root = arguments_schema(tool)
    head, end = grammar.literal(f'{INVOKE}{tool.name}">'), grammar.literal(f"{INVOKE_END}\n")
    return f"{head} {_properties(grammar, root, root, 0)} {end}"


def _properties(grammar: ToolCallGrammar, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
    required, parts = schema.get("required") or (), ['""']
    for name, value in (schema.get("properties") or {}).items():
        one = grammar.rule(_element(grammar, name, value, root, depth))
        parts.append(one if name in required else f"{one}?")
    return " ".join(parts)


def _element(grammar: ToolCallGrammar, name: str, schema: Any, root: Mapping[str, Any], depth: int) -> str:
    schema = resolve_ref(schema, root) if isinstance(schema, Mapping) else {}
    opening, end = grammar.literal(f"{_TAG}{name}>"), f"{_END_TAG}{name}>"
    if schema.get("type") == "object" and schema.get("properties") and depth < _MAX_GRAMMAR_DEPTH:
        return f"{opening} {_properties(grammar, schema, root, depth + 1)} {grammar.literal(end)}"
    if schema.get("type") == "array" and depth < _MAX_GRAMMAR_DEPTH:
        item = grammar.rule(_element(grammar, ITEM, schema.get("items"), root, depth + 1))
        return f"{opening} {item}* {grammar.literal(end)}"
    return f"{opening} {value_grammar(grammar, root, schema, end)}"


FORMAT = ToolCallFormat({OPEN: read_calls}, (MARK,), (MARK,), call_list(call_grammar, before=f"{OPEN}\n", after=CLOSE))
REASONING_FORMAT = reasoning_format(*THINK)
