"""<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>: Gemma 4."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.parsing.argument_types import resolve_ref
from paceline.parsing.end_mark import pass_end_mark, skip_repeated_mark
from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import ReasoningFormat, ToolCallFormat
from paceline.parsing.json_call import skip_closers
from paceline.parsing.lenient_json import RawQuotes, emit_json_object
from paceline.parsing.markers import Markers
from paceline.parsing.reasoning import drop_mark, reasoning_until
from paceline.parsing.text_stream import WHITESPACE, MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar, arguments_schema
from paceline.parsing.tools import Tool

THINK = ("<|channel>", "<channel|>")
OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CALL, _LABEL = "call:", "thought"
_RESPONSE = "<|tool_response>"  # the result of a call, whose mark the model at times writes itself
_QUOTES = RawQuotes(QUOTE, OPEN, CLOSE)
_READER = reasoning_until(THINK[1])
_NAME = re.compile(r"[\w.\-]")
_PLAIN = ("integer", "number", "boolean", "null")
_MAX_DEPTH = 8  # schemas that contain themselves are followed so far


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse the calls of a block after one or more opening marks."""
    yield from skip_repeated_mark(stream, OPEN)
    if sink.num_calls and (yield from stream.peek()) == "":  # an opening mark where a closing one should be
        return
    yield from stream.take(_CALL)
    yield from _read_call(stream, sink)
    while sink.can_call:
        yield from stream.skip(WHITESPACE + ",;")
        if not (yield from stream.take(_CALL)):
            break
        yield from _read_call(stream, sink)
    yield from pass_end_mark(stream, CLOSE)
    yield from stream.take_or_end(_RESPONSE)


def _read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    name = yield from stream.matching(_NAME)
    yield from stream.skip()
    if not name or (yield from stream.peek()) != "{":
        raise MalformedError
    stream.mark_emitted()
    with sink.call(name):
        yield from emit_json_object(stream, sink.arguments, raw=_QUOTES)
    yield from skip_closers(stream)
    while (yield from stream.take(QUOTE)):
        yield from skip_closers(stream)


def drop_stray_mark(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Leave a mark after a call out of the text."""
    yield from ()
    if not sink.num_calls:
        raise MalformedError


MARKERS = Markers(anywhere={OPEN: read_calls, **dict.fromkeys((CLOSE, _RESPONSE), drop_stray_mark)})


def read_reasoning(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse reasoning after one or more opening marks. Its label may be missing."""
    yield from skip_repeated_mark(stream, THINK[0])
    if (yield from stream.one_of((f"{_LABEL}\n", _LABEL + THINK[1]))) is not None:
        stream.at += len(_LABEL)
    yield from _READER(stream, sink)


THINK_MARKERS = Markers(anywhere={THINK[0]: read_reasoning, THINK[1]: drop_mark})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Return a grammar of calls with properties in alphabetical order, as the model has learnt them.

    Of texts only their `enum` is enforced, of lists no length.
    """
    calls = []
    for tool in tools:
        schema = arguments_schema(tool)
        opening = grammar.text(f"{OPEN}call:{tool.name}")
        calls.append(f"{opening} {_Values(grammar, schema).of(schema, 0)} {grammar.text(CLOSE)}")
    return grammar.listed(calls, "", several=several)


class _Values:
    """Rules for the values of one tool."""

    def __init__(self, grammar: ToolCallGrammar, root: Mapping[str, Any]) -> None:
        self._grammar, self._root = grammar, root

    def of(self, schema: Any, depth: int) -> str:
        """Return what matches one value."""
        schema = resolve_ref(schema, self._root) if isinstance(schema, Mapping) else {}
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and values:
            return self._grammar.one_of([self._constant(value) for value in values])
        options = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(options, list) and options:
            return self._grammar.one_of([self.of(option, depth) for option in options])
        types = schema.get("type") or ["string", "number", "boolean", "null"]
        return self._grammar.one_of([self._typed(name, schema, depth) for name in ([types] if isinstance(types, str) else types)])

    def _typed(self, name: str, schema: Mapping[str, Any], depth: int) -> str:
        if name in _PLAIN:  # as in JSON
            return self._grammar.json({**schema, "type": name})
        if name == "array" and depth < _MAX_DEPTH:
            item = self._grammar.rule(self.of(schema.get("items"), depth + 1))
            return self._grammar.rule(f'"[" ({item} ("," {item})*)? "]"')
        if name == "object" and depth < _MAX_DEPTH:
            return self._object(schema, depth)
        return f"{self._grammar.text(QUOTE)} {self._grammar.until(QUOTE)}"

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        """Return a rule for properties in order, built from the last one to the first, because each rule names the next."""
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        first = following = '""'
        for name in sorted(properties, key=str.lower, reverse=True):
            value = self._grammar.rule(f"{self._grammar.text(name + ':')} {self.of(properties[name], depth + 1)}")
            is_required = name in required
            first = self._grammar.rule(f"{value} {following}" + ("" if is_required else f" | {first}"))
            following = self._grammar.rule(f'"," {value} {following}' if is_required else f'("," {value})? {following}')
        return f'"{{" {first} "}}"'

    def _constant(self, value: object) -> str:
        if isinstance(value, str):
            return self._grammar.text(f"{QUOTE}{value}{QUOTE}")
        return self._grammar.text(json.dumps(value))


FORMAT = ToolCallFormat(MARKERS, (OPEN,), (OPEN, CLOSE, QUOTE), calls_grammar, OPEN)
REASONING_FORMAT = ReasoningFormat(THINK_MARKERS, THINK[:1], THINK, "<|channel>thought\n", THINK[1])
