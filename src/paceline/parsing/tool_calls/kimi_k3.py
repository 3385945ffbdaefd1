"""Sections between <|open|>name<|sep|> and <|close|>name<|sep|>: Kimi-K3.

The sections of an answer are think, response and tools. A call has its name and each argument its key and type as attributes; arguments
may also be one JSON object in a section `json`.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape, unescape
from typing import Any

from paceline.parsing.argument_types import parameter_schema
from paceline.parsing.events import EventSink
from paceline.parsing.formats import ReasoningFormat, ToolCallFormat, section_of
from paceline.parsing.lenient_json import emit_json_object, escape_json
from paceline.parsing.reasoning import ReasoningReader, drop_mark
from paceline.parsing.tagged_calls import TaggedCallFormat, TaggedValues
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar, parameters_grammar
from paceline.parsing.tools import Tool

OPEN_TAG, CLOSE_TAG, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
TOKENS = (OPEN_TAG, CLOSE_TAG, SEPARATOR)
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def section(name: str) -> tuple[str, str]:
    """Return the marks around a section."""
    return f"{OPEN_TAG}{name}{SEPARATOR}", f"{CLOSE_TAG}{name}{SEPARATOR}"


THINK, RESPONSE, MESSAGE = section("think"), section("response"), section("message")
OPEN, CLOSE = section("tools")
_CALL, _CALL_END = f"{OPEN_TAG}call ", section("call")[1]
_ARGUMENT, _ARGUMENT_END = f"{OPEN_TAG}argument ", section("argument")[1]
_TAG_END = f'"{SEPARATOR}'
_TAGS = TaggedCallFormat(open=OPEN, close=CLOSE, function=_CALL, function_end=_CALL_END, parameter=_ARGUMENT, parameter_end=_ARGUMENT_END)
_JSON, _JSON_END = f"{OPEN_TAG}json", section("json")[1]


def _read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse a call after the beginning of its tag."""
    name = (yield from _read_attributes(stream)).get("tool")
    if not name:
        raise MalformedError
    yield from stream.skip()
    stream.mark_emitted()
    with sink.call(name):
        if (yield from stream.take(_JSON)):
            yield from stream.until(SEPARATOR)
            yield from stream.skip()
            yield from emit_json_object(stream, sink.arguments)
            yield from stream.skip()
            yield from stream.take_or_end(_JSON_END)
        else:
            sink.arguments("{")
            yield from _read_arguments(stream, sink, sink.schema_of(name))
        yield from stream.skip()
        yield from stream.take_or_end(_CALL_END)
        stream.mark_emitted()
    yield from stream.skip()


def _read_arguments(stream: TextStream, sink: EventSink, root: Mapping[str, Any] | None) -> Parse[None]:
    before = ""
    while (yield from stream.take(_ARGUMENT)):
        begin, attributes = stream.position, (yield from _read_attributes(stream))
        key = attributes.get("key", "")
        schema = parameter_schema(root, key)
        if schema is None:  # the model names the type
            schema = {"type": attributes.get("type", "string")}
        yield from TaggedValues.of(stream, sink, _TAGS).read(f'{before}"{escape_json(key)}": ', schema, begin)
        before = ", "
        yield from stream.skip()


def _read_attributes(stream: TextStream) -> Parse[dict[str, str]]:
    """Pass the rest of an opening tag."""
    return {name: unescape(value) for name, value in _ATTRIBUTE.findall((yield from stream.until(SEPARATOR)))}


read_reasoning = ReasoningReader(THINK[1], open=THINK[0])
# the marks of the answer are also those of reasoning, because they are markup without tools, too
_ANSWER = dict.fromkeys((*RESPONSE, MESSAGE[1]), drop_mark)


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Return a grammar of an empty answer and calls with arguments in the schema's order. Of texts only their `enum` is enforced."""

    def opening(name: str, schema: Mapping[str, Any]) -> str:
        named = schema.get("type")
        types = grammar.literal(named) if isinstance(named, str) else "/[a-z]+/"
        key = grammar.literal(f'{_ARGUMENT}key="{escape(name)}" type="')
        return f"{key} {types} {grammar.literal(_TAG_END)}"

    calls = []
    for tool in tools:
        head = grammar.literal(f'{_CALL}tool="{escape(tool.name)}" index="')
        arguments = parameters_grammar(grammar, tool, opening, _ARGUMENT_END)
        calls.append(f"{head} /[0-9]{{1,3}}/ {grammar.literal(_TAG_END)} {arguments} {grammar.literal(_CALL_END)}")
    empty = grammar.literal("".join(RESPONSE))
    return f"({empty})? {grammar.literal(OPEN)} {grammar.listed(calls, '', several=several)} {grammar.literal(CLOSE)}"


FORMAT = ToolCallFormat({OPEN: section_of(_CALL, _read_call, CLOSE), **_ANSWER}, (OPEN_TAG, "'tools'"), TOKENS, calls_grammar)
REASONING_FORMAT = ReasoningFormat(
    _ANSWER, (OPEN_TAG, "'think'"), TOKENS, *THINK, read_reasoning, first={THINK[0]: read_reasoning, THINK[1]: drop_mark}
)
