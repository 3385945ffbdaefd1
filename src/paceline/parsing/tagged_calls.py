"""Calls whose arguments are values between tags, such as <function=f><parameter=city>Paris</parameter></function>.

Formats differ only in their tags, so each is one `TaggedCallFormat`. `tagged_values` reads values that contain tags or lack their end tag.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.parsing.argument_types import is_text, parameter_schema
from paceline.parsing.event_sink import EventSink
from paceline.parsing.lenient_json import escape_json
from paceline.parsing.schema_grammar import parameters_grammar
from paceline.parsing.tagged_values import TaggedValues, ValueTags
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

_NAME = re.compile(r"[^<>\n\"']")
_UNQUOTED = re.compile(r"[^\s\"'<>]")
_KEY = re.compile(r"[^<]")
_ATTRIBUTE = re.compile(r"[^<>]")
_IS_TEXT, _IS_JSON = 'string="true"', 'string="false"'
_NOT_TEXT = ("integer", "number", "boolean", "array", "object")
_LIST, _LIST_END = "<arguments>", "</arguments>"
LINE_END = '"\\n"?'


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCallFormat:
    """Reads calls with tagged parameters, and builds their grammar, from the tags of a format.

    Attributes:
        open, close: what begins and ends a block of calls; either may be empty.
        function, function_end: what begins a call, before its name, and what ends it; either may be empty.
        parameter, parameter_end: what begins a parameter, before its name, and what ends its value.
        attribute: what follows `function` or `parameter`, perhaps after white space, before a name.
        quote: the mark after a name, and before it where there is `attribute`.
        key_end, value: what follows the name of a parameter and what begins its value; empty = the parameter's tag ends with ">".
        border: what is written around a value, within its tags.
        is_block: whether a block has several calls; otherwise each call has a block of its own.
        is_xml: whether values are those of XML, as in `ValueTags`, and <arguments> may be around the parameters.
        has_types: whether the tag of a parameter has the attribute string="true" or string="false".
    """

    open: str = ""
    close: str = ""
    function: str = ""
    function_end: str = ""
    parameter: str
    parameter_end: str
    attribute: str = ""
    quote: str = ""
    key_end: str = ""
    value: str = ""
    border: str = ""
    is_block: bool = False
    is_xml: bool = False
    has_types: bool = False

    @property
    def value_tags(self) -> ValueTags:
        """The tags that a value may end with."""
        endings = tuple(filter(None, (self.function_end, self.close)))
        return ValueTags(self.parameter, self.parameter_end, self.function, endings, self.border, self.open, is_xml=self.is_xml)

    def read_calls(self, stream: TextStream, sink: EventSink) -> Parse[None]:
        """Parse a block of calls after one or more opening marks."""
        yield from stream.skip_repeated(self.open)
        if sink.num_calls and (yield from stream.peek()) == "":  # an opening mark where a closing one should be
            return
        yield from stream.expect(self.function)
        yield from self.read_functions(stream, sink)

    def read_functions(self, stream: TextStream, sink: EventSink) -> Parse[None]:
        """Parse all calls of a block, whose first `function` was passed, and the end of the block."""
        yield from self.read_function(stream, sink)
        yield from stream.skip()
        while sink.can_call and (yield from stream.take(self.function)):
            yield from self.read_function(stream, sink)
            yield from stream.skip()
        yield from stream.pass_end_mark(self.close)

    def read_function(self, stream: TextStream, sink: EventSink) -> Parse[None]:
        """Parse a call after `function`.

        Raises:
            MalformedError: the text is no call.
        """
        name, _, has_end = yield from self._read_name(stream)
        if not name or not name.isprintable() or (not has_end and (yield from stream.peek()) not in ("\n", "<")):
            raise MalformedError
        if self.attribute:  # ordinary text may contain such tags
            yield from self._skip_list_tag(stream, _LIST)
            if (yield from stream.one_of((self.parameter, self.function_end))) is None and (yield from stream.peek()) != "":
                raise MalformedError
        stream.mark_emitted()
        with sink.call(_tool_name(name, sink)):
            sink.arguments("{")
            yield from self.read_parameters(stream, sink, sink.schema_of(_tool_name(name, sink)))
        yield from stream.take_or_end(self.function_end)
        stream.mark_emitted()

    def read_parameters(self, stream: TextStream, sink: EventSink, schema: Mapping[str, Any] | None) -> Parse[None]:
        """Parse all parameters of a call and emit them, without the braces around them."""
        values, before = TaggedValues.of(stream, sink, self.value_tags), ""
        while True:
            yield from stream.skip()
            stream.mark_emitted()
            if (yield from stream.take(self.parameter)):
                begin = stream.position
                key, attributes, has_end = yield from self._read_key(stream)
                if has_end:
                    head = f'{before}"{escape_json(key)}": '
                    yield from values.read(head, _typed(parameter_schema(schema, key), attributes), begin)
                    before = ", "
                else:
                    yield from values.skip(begin)
            elif not (yield from stream.take(self.parameter_end)):
                break
        yield from self._skip_list_tag(stream, _LIST_END)
        stream.mark_emitted()

    def _skip_list_tag(self, stream: TextStream, tag: str) -> Parse[None]:
        yield from stream.skip()
        if self.is_xml and (yield from stream.take(tag)):
            yield from stream.skip()

    def _read_key(self, stream: TextStream) -> Parse[tuple[str, str, bool]]:
        """Pass the rest of a parameter's tag as `_read_name` does; `key_end` or `value` may be missing."""
        if not self.key_end:
            return (yield from self._read_name(stream))
        key = yield from stream.matching(_KEY)
        tags = (self.key_end, self.value, *self.value_tags.all)
        while (yield from stream.one_of(tags)) is None and (yield from stream.take("<")):
            key += "<" + (yield from stream.matching(_KEY))
        key = key.strip()
        yield from stream.take_or_end(self.key_end)
        yield from stream.skip()
        if not (yield from stream.take_or_end(self.value)):
            for ending in self.value_tags.endings:
                if (yield from stream.take_or_end(ending)):
                    raise MalformedError
        return key, "", (yield from stream.peek()) != ""

    def _read_name(self, stream: TextStream) -> Parse[tuple[str, str, bool]]:
        """Pass the rest of an opening tag. Return the name, the other attributes, and whether the tag has an end."""
        if self.attribute:
            yield from stream.skip()
            yield from stream.expect(self.attribute)
        is_quoted = (yield from stream.one_of(('"', "'"))) is not None
        yield from stream.skip(" \"'")
        name = (yield from stream.matching(_UNQUOTED if self.attribute and not is_quoted else _NAME)).strip()
        yield from stream.skip("\"'")
        attributes = (yield from stream.matching(_ATTRIBUTE)).strip() if self.quote else ""
        has_end = yield from stream.take(">")
        if self.has_types and has_end and attributes not in ("", _IS_TEXT, _IS_JSON):
            raise MalformedError
        return name, attributes, has_end

    def calls_grammar(self, grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
        """Return a grammar of calls with parameters in the schema's order."""
        calls = [self.call_grammar(grammar, tool) for tool in tools]
        opening, closing = grammar.literal(f"{self.open}\n"), grammar.literal(self.close)
        if self.is_block:
            return f"{opening} {grammar.listed([f'{call} {_newline(grammar)}' for call in calls], '', several=several)} {closing}"
        blocks = [f"{opening} {call} {_newline(grammar)} {closing}" for call in calls]
        return grammar.listed(blocks, "\n", several=several)

    def call_grammar(self, grammar: ToolCallGrammar, tool: Tool, line_end: str = "\n") -> str:
        """Return a grammar of a call, with `line_end` after each tag. Of a string's keywords only `enum` is enforced."""

        def opening(name: str, schema: Mapping[str, Any]) -> str:
            types = f" {_IS_TEXT if is_text(schema) else _IS_JSON}" if self.has_types else ""
            return grammar.literal(f"{self._tag(self.parameter, name)}{types}>{self.border}")

        parameters = parameters_grammar(grammar, tool, opening, f"{self.border}{self.parameter_end}{line_end}")
        return f"{grammar.literal(f'{self._tag(self.function, tool.name)}>{line_end}')} {parameters} {grammar.literal(self.function_end)}"

    def _tag(self, begin: str, name: str) -> str:
        return f"{begin}{f' {self.attribute}{self.quote}' if self.attribute else ''}{name}{self.quote}"

    def pairs_grammar(self, grammar: ToolCallGrammar, tool: Tool) -> str:
        """Return a grammar of pairs of a key and a value between tags, with line ends or without."""

        def opening(name: str, _: Mapping[str, Any]) -> str:
            return f"{grammar.literal(f'{self.parameter}{name}{self.key_end}')} {LINE_END} {grammar.literal(self.value)}"

        return f"{LINE_END} {parameters_grammar(grammar, tool, opening, self.parameter_end, LINE_END)}"


def _newline(grammar: ToolCallGrammar) -> str:
    return grammar.literal("\n")


def _tool_name(name: str, sink: EventSink) -> str:
    """Return the name of the tool, which some models write twice: f.f."""
    head, _, tail = name.partition(".")
    return head if head == tail and name not in sink.tool_names and head in sink.tool_names else name


def _typed(schema: Mapping[str, Any] | None, attributes: str) -> Mapping[str, Any] | None:
    """Return the schema of a value whose tag may give its type. A value with string="true" is a string if the schema allows strings."""
    if attributes == _IS_TEXT:
        return schema if schema is not None and schema.get("type") in _NOT_TEXT else {"type": "string"}
    return {} if schema is None and attributes == _IS_JSON else schema
