"""Calls as JSON objects between two marks: a list of them, or one object per pair of marks.

Many model families differ only in the marks and in the names of two keys, so that a format is one `JsonCallList`.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.parsing.event_sink import EventSink
from paceline.parsing.json_call import read_json_call
from paceline.parsing.lenient_json import emit_json_object, read_json_value, read_short_string
from paceline.parsing.output_parser import Markers, ParseMarkup
from paceline.parsing.text_stream import WHITESPACE, MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

_SEPARATORS = ",;"
_ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCallList:
    """How one family writes calls. Reading accepts a list or single objects, in a code fence or not, with the end mark or without.

    Attributes:
        open_marks: marks that begin calls; the grammar writes the first. A "[" at a mark's end is the list's.
        close_marks: marks that end calls.
        name_key: key of the tool's name.
        only_known: whether calls must have arguments and name an offered tool. For marks that may also begin ordinary text.
        before, between, after: texts around and between the calls, as the model has learnt them.
        head, tail: texts around the arguments of one call; "NAME" in `head` stands for the quoted name.
    """

    open_marks: tuple[str, ...]
    close_marks: tuple[str, ...] = ()
    name_key: str = "name"
    only_known: bool = False
    before: str = ""
    between: str = ", "
    after: str = ""
    head: str = '{"name": NAME, "arguments": '
    tail: str = "}"

    @property
    def markers(self) -> Markers:
        """Each of `open_marks` begins calls anywhere in an answer."""
        return Markers(anywhere={mark: self.reader(1 if mark.endswith("[") else 0) for mark in self.open_marks})

    def reader(self, num_back: int = 0) -> ParseMarkup:
        """Return a function that parses calls, of which the last `num_back` characters of the mark are the beginning."""

        def read(stream: TextStream, sink: EventSink) -> Parse[None]:
            stream.at -= num_back
            yield from self.read_calls(stream, sink)

        return read

    def read_calls(self, stream: TextStream, sink: EventSink) -> Parse[None]:
        """Parse the calls and the end mark.

        Raises:
            MalformedError: the text is no call, or more calls follow than the request allows.
        """
        yield from stream.skip()
        is_fenced = yield from take_fence(stream)
        is_list = yield from stream.take("[")
        yield from stream.skip()
        if not (is_list and not self.only_known and (yield from stream.peek()) == "]"):
            yield from self._read_each(stream, sink, is_list=is_list)
        yield from stream.take_or_end("]")
        yield from stream.skip()
        if is_fenced and (yield from stream.take_or_end("```")):
            yield from stream.skip()
        while (yield from stream.peek()) != "" and (yield from take_any(stream, self.close_marks)):  # models also write it twice
            yield from stream.skip()

    def _read_each(self, stream: TextStream, sink: EventSink, *, is_list: bool) -> Parse[None]:
        """Parse calls up to something that is none. Missing commas, trailing commas and doubled braces are accepted."""
        while True:
            yield from self._read_call(stream, sink)
            stream.mark_emitted()
            yield from stream.skip(WHITESPACE + "}")
            if is_list:
                yield from stream.skip(WHITESPACE + _SEPARATORS)
            if (yield from stream.peek()) != "{":
                return
            if not sink.can_call:
                raise MalformedError

    def _read_call(self, stream: TextStream, sink: EventSink) -> Parse[None]:
        if self.name_key == "name":
            yield from read_json_call(stream, sink, only_known=self.only_known)
        else:
            yield from read_keyed_call(stream, sink, self.name_key, sink.tool_names if self.only_known else None)

    def calls_grammar(self, grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
        """Build the grammar of the calls and of the marks around them."""
        before, after = self.open_marks[0].removesuffix("[") + self.before, self.after
        if not self.before:  # every call has marks of its own
            calls = [grammar.call(before + self.head_of(tool), tool, self.tail + after) for tool in tools]
            return grammar.listed(calls, self.between, several=several)
        calls = [grammar.call(self.head_of(tool), tool, self.tail) for tool in tools]
        return f"{grammar.text(before)} {grammar.listed(calls, self.between, several=several)} {grammar.text(after)}"

    def head_of(self, tool: Tool) -> str:
        """Return the text before the arguments of a call."""
        return self.head.replace("NAME", json.dumps(tool.name))


def read_keyed_call(stream: TextStream, sink: EventSink, name_key: str, known: Collection[str] | None = None) -> Parse[None]:
    """Parse one call whose name has a key other than "name".

    Args:
        known: names of tools; other names are no call. None = any name.

    Raises:
        MalformedError: it is no call.
    """
    yield from stream.skip()
    yield from stream.expect("{")
    yield from stream.skip()
    name = held = None
    has_arguments = False
    while not (yield from stream.take("}")):
        key = yield from _read_key(stream)
        if key in (name_key, "name"):
            name = yield from read_short_string(stream)
            if not name or (known is not None and name not in known):
                raise MalformedError
        elif key in _ARGUMENT_KEYS and name is not None and (yield from stream.peek()) == "{":
            stream.mark_emitted()
            with sink.call(name):
                yield from emit_json_object(stream, sink.arguments)
            stream.mark_emitted()
            has_arguments = True
        else:
            value = yield from read_json_value(stream)
            held = value if key in _ARGUMENT_KEYS else held
        yield from stream.skip()
        if not (yield from stream.take(",")) and (yield from stream.peek()) != "}":
            if has_arguments:  # only the brace is missing
                return
            raise MalformedError
        yield from stream.skip()
    if has_arguments:
        return
    if name is None:
        raise MalformedError
    arguments = "{}" if held is None else _object_text(held)
    with sink.call(name):
        sink.arguments(arguments)


def _read_key(stream: TextStream) -> Parse[str]:
    key = yield from read_short_string(stream)
    yield from stream.skip()
    yield from stream.expect(":")
    yield from stream.skip()
    return key


def _object_text(held: str) -> str:
    """Return the JSON of an object, which may be written within a string.

    Raises:
        MalformedError: it is no object.
    """
    try:
        value = json.loads(held)
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise MalformedError from None
    if not isinstance(value, dict):
        raise MalformedError
    return json.dumps(value, ensure_ascii=False)


def take_fence(stream: TextStream) -> Parse[bool]:
    """Pass the opening line of a code fence and white space after it. Return whether there was one."""
    if not (yield from stream.take("```")):
        return False
    yield from stream.take("json")
    yield from stream.skip()
    return True


def take_any(stream: TextStream, marks: Sequence[str]) -> Parse[bool]:
    """Pass one of `marks`, or the beginning of one at the end of the text. Return whether there was one."""
    for mark in marks:
        if (yield from stream.take_or_end(mark)):
            return True
    return False
