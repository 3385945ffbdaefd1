"""Calls whose arguments are values between tags, such as <function=f><parameter=city>Paris</parameter></function>.

Formats differ only in their tags, so each is one `TaggedCallFormat`.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.parsing.argument_types import coerce_argument, is_text, parameter_schema
from paceline.parsing.events import EventSink
from paceline.parsing.lenient_json import escape_json
from paceline.parsing.text_stream import WHITESPACE, Emit, MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar, parameters_grammar
from paceline.parsing.tools import Tool

_NAME = re.compile(r"[^<>\n\"']")
_UNQUOTED = re.compile(r"[^\s\"'<>]")
_KEY = re.compile(r"[^<]")
_ATTRIBUTE = re.compile(r"[^<>]")
_IS_TEXT, _IS_JSON = 'string="true"', 'string="false"'
_NOT_TEXT = ("integer", "number", "boolean", "array", "object")
_LIST, _LIST_END = "<arguments>", "</arguments>"
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&apos;": "'"}
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
        border: a line end, where one is written around a value and is not part of it. Before other tags it never is.
        is_block: whether a block has several calls; otherwise each call has a block of its own.
        is_xml: whether CDATA and entities are read, white space around a value is left out, a value without an end is left out unless it
            is a string, and <arguments> may be around the parameters.
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
    def endings(self) -> tuple[str, ...]:
        """What ends a call; the first one ends what `function` begins."""
        return tuple(filter(None, (self.function_end, self.close)))

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags with which a value may end, without the border."""
        return tuple(filter(None, (self.parameter, self.parameter_end, self.function, self.open, *self.endings)))

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
        values, before = TaggedValues.of(stream, sink, self), ""
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
        tags = (self.key_end, self.value, *self.tags)
        while (yield from stream.one_of(tags)) is None and (yield from stream.take("<")):
            key += "<" + (yield from stream.matching(_KEY))
        key = key.strip()
        yield from stream.take_or_end(self.key_end)
        yield from stream.skip()
        if not (yield from stream.take_or_end(self.value)):
            for ending in self.endings:
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
        opening, newline, closing = map(grammar.literal, (f"{self.open}\n", "\n", self.close))
        calls = [f"{self.call_grammar(grammar, tool)} {newline}" for tool in tools]
        if self.is_block:
            return f"{opening} {grammar.listed(calls, '', several=several)} {closing}"
        return grammar.listed([f"{opening} {call} {closing}" for call in calls], "\n", several=several)

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


def _tool_name(name: str, sink: EventSink) -> str:
    """Return the name of the tool, which some models write twice: f.f."""
    head, _, tail = name.partition(".")
    return head if head == tail and name not in sink.tool_names and head in sink.tool_names else name


def _typed(schema: Mapping[str, Any] | None, attributes: str) -> Mapping[str, Any] | None:
    """Return the schema of a value whose tag may give its type. A value with string="true" is a string if the schema allows strings."""
    if attributes == _IS_TEXT:
        return schema if schema is not None and schema.get("type") in _NOT_TEXT else {"type": "string"}
    return {} if schema is None and attributes == _IS_JSON else schema


class TaggedValues:
    """Parses the argument values of all tool calls of an answer, also if tags are missing or are part of a value.

    A value ends at its closing tag. Three rules decide from the tags that follow what another tag means:

    * An opening tag is text if the value is closed later, with opening and closing tags counted as brackets; otherwise it ends the value.
    * A closing tag is text if other text and then another closing tag follow; otherwise it ends the value.
    * The end mark of the call is text if the next tag closes the value; otherwise it ends the value.

    Text is held back only from an unexpected tag until the deciding tags have arrived.
    """

    def __init__(self, stream: TextStream, sink: EventSink, markup: TaggedCallFormat) -> None:
        self._stream, self._sink, self._markup = stream, sink, markup
        self._pattern = re.compile("|".join(map(re.escape, markup.tags)))
        self._longest = max(map(len, markup.tags))
        self._marks = (*markup.tags, *("\n" + tag for tag in markup.tags if markup.border or tag != markup.parameter_end))
        self._marks += (_CDATA, *_ENTITIES) if markup.is_xml else ()
        self._found: list[tuple[int, str]] = []  # tags by their position
        self._num_searched = 0
        self._closed_at: dict[int, int | None] = {}  # of opening tags, by the position after them
        self._after_endings = (0, 0)
        self._text_until = 0

    @classmethod
    def of(cls, stream: TextStream, sink: EventSink, markup: TaggedCallFormat) -> "TaggedValues":
        """Return the reader of an answer's values, which is made for its first call."""
        if markup not in stream.kept:
            stream.kept[markup] = cls(stream, sink, markup)
        found: TaggedValues = stream.kept[markup]
        return found

    def read(self, head: str, schema: Mapping[str, Any] | None, begin: int) -> Parse[None]:
        """Pass a value, and its closing tag if there is one, and emit `head` and the value.

        A string is emitted while it arrives, any other value once it is complete. A string without an end is not closed, which makes its
        call incomplete. An empty value of another type is left out.

        Args:
            head: JSON before the value.
            begin: position after its opening tag.
        """
        parts: list[str] = []
        if is_text(schema):
            self._sink.arguments(f'{head}"')
            if (yield from self._read(lambda part: self._sink.arguments(escape_json(part)), begin)):
                self._sink.arguments('"')
            return
        is_whole = yield from self._read(parts.append, begin)
        value = "".join(parts)
        if is_whole or (value.strip() and not self._markup.is_xml):
            self._sink.arguments(head + coerce_argument(value, schema))

    def skip(self, begin: int) -> Parse[None]:
        """Pass a value as `read` does, without emitting it."""
        yield from self._read(lambda _: None, begin)

    def _read(self, emit: Emit, begin: int) -> Parse[bool]:
        """Return whether a tag ended the value."""
        stream, markup = self._stream, self._markup
        yield from stream.skip() if markup.is_xml else stream.take(markup.border)
        stream.mark_emitted()

        def emit_text(part: str) -> None:
            emit(_without_open_mark(part, self._marks) if stream.has_ended else part)

        while (mark := (yield from stream.emit_until(self._marks, emit_text, held=WHITESPACE if markup.is_xml else ""))) is not None:
            tag = mark if mark in markup.tags else mark.removeprefix("\n")
            if tag in markup.tags and (yield from self._ends_value(tag, stream.position + len(mark) - len(tag), begin)):
                stream.at += len(mark) if tag == markup.parameter_end else len(mark) - len(tag)
                break
            emit(stream.unemitted + _ENTITIES.get(mark, "" if mark == _CDATA else mark))
            stream.at += len(mark)
            stream.mark_emitted()
            if mark == _CDATA and (yield from stream.emit_until((_CDATA_END,), emit)) is not None:
                stream.at += len(_CDATA_END)
                stream.mark_emitted()
        stream.mark_emitted()
        return mark is not None

    def _ends_value(self, tag: str, position: int, begin: int) -> Parse[bool]:
        if position < self._text_until:
            return False
        if tag == self._markup.parameter_end:
            if position == self._text_until:
                return True
            following = yield from self._next_tag(position + len(tag))
            return following is None or following[1] != tag or not self._has_text(position + len(tag), following[0])
        if tag in self._markup.endings:
            return not (yield from self._is_text_ending(position + len(tag)))
        if begin not in self._closed_at:
            yield from self._match_tags(begin, position)
        closed_at = self._closed_at[begin]
        self._text_until = closed_at or 0
        return closed_at is None

    def _has_text(self, begin: int, end: int) -> bool:
        return bool(self._stream.text[begin - self._stream.num_dropped : end - self._stream.num_dropped].strip())

    def _match_tags(self, begin: int, position: int) -> Parse[None]:
        """Find which values are closed, from the one at `begin` to the end of the call, if tags are counted as brackets."""
        markup, open_values, num_calls = self._markup, [begin], 0
        self._closed_at[begin] = None
        while open_values and (found := (yield from self._next_tag(position))) is not None:
            position, tag = found[0] + len(found[1]), found[1]
            if tag == markup.parameter_end:
                while open_values and open_values[-1] < 0:
                    open_values.pop()
                    num_calls -= 1
                if open_values:
                    self._closed_at[open_values.pop()] = found[0]
            elif tag == markup.parameter:
                open_values.append(position)
                self._closed_at[position] = None
            elif tag == markup.function:
                open_values.append(-1)
                num_calls += 1
            elif tag == markup.endings[0] and num_calls:
                while open_values.pop() >= 0:
                    pass
                num_calls -= 1
            elif tag in markup.endings and not (yield from self._is_text_ending(position)):
                return

    def _is_text_ending(self, position: int) -> Parse[bool]:
        """Return whether the next tag after the end mark before `position`, other end marks left out, closes a value."""
        if not self._after_endings[0] <= position <= self._after_endings[1]:
            first = position
            while (found := (yield from self._next_tag(position))) is not None and found[1] in self._markup.endings:
                position = found[0] + len(found[1])
            self._after_endings = (first, position)
        found = yield from self._next_tag(self._after_endings[1])
        return found is not None and found[1] == self._markup.parameter_end

    def _next_tag(self, position: int) -> Parse[tuple[int, str] | None]:
        """Return the first tag at or after a position; None if the text ends without one."""
        while True:
            index = bisect_left(self._found, (position, ""))
            if index < len(self._found):
                return self._found[index]
            start = max(self._num_searched, position) - self._stream.num_dropped
            if found := self._pattern.search(self._stream.text, start):
                self._found.append((self._stream.num_dropped + found.start(), found[0]))
                self._num_searched = self._stream.num_dropped + found.end()
                continue
            if self._stream.has_ended:
                return None
            self._num_searched = self._stream.num_dropped + max(start, len(self._stream.text) - self._longest + 1)
            yield


def _without_open_mark(text: str, marks: Sequence[str]) -> str:
    """Remove the beginning of a mark from the end of a text."""
    for at in range(max(0, len(text) - max(map(len, marks))), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return text[:at]
    return text
