"""Parses calls that are JSON objects with the tool's name and its arguments, as in most formats.

Models also write lists of such objects, put them into code fences or under the key "function", and give the arguments as a string that
holds the object, as null, or not at all. `read_json_calls` reads all of these.
"""

import json
import re
from dataclasses import dataclass

from paceline.parsing.events import EventSink
from paceline.parsing.formats import BuildCallGrammar, ParseMarkup, ToolCallFormat, call_list, including_mark
from paceline.parsing.lenient_json import RawQuotes, emit_json_object, parse_json, read_json_value, read_short_string
from paceline.parsing.text_stream import WHITESPACE, MalformedError, Parse, TextStream
from paceline.parsing.tools import Tool

_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "tool_name")  # the second is Cohere's
_NESTED = ("function", "tool_call")
_FENCE = "```"
_LANGUAGE = re.compile(r"[\w+-]")
_AFTER_NAME = "<[`"  # first characters of end marks


def read_json_calls(stream: TextStream, sink: EventSink, *, only_known: bool = False) -> Parse[None]:
    """Pass one call, a list of calls, or several calls, perhaps in a code fence, and emit them.

    Args:
        only_known: as for `read_json_call`.

    Raises:
        MalformedError: the text does not begin with a call.
    """
    yield from stream.skip()
    is_fenced = yield from take_fence(stream)
    is_list = yield from stream.take("[")
    yield from stream.skip()
    if is_list and (yield from stream.take("]")):
        if only_known:
            raise MalformedError
    else:
        yield from read_json_call(stream, sink, only_known=only_known)
        yield from _read_more(stream, sink, only_known=only_known)
    yield from skip_closers(stream)
    if is_fenced:
        yield from stream.take_or_end(_FENCE)
    stream.mark_emitted()


def take_fence(stream: TextStream) -> Parse[bool]:
    """Pass the opening line of a code fence and white space after it; returns whether there was one."""
    if not (yield from stream.take(_FENCE)):
        return False
    yield from stream.matching(_LANGUAGE)
    yield from stream.skip()
    return True


def _read_more(stream: TextStream, sink: EventSink, *, only_known: bool) -> Parse[None]:
    """Pass further calls; text that is no call is left to the caller."""
    while sink.can_call:
        stream.mark_emitted()
        yield from stream.skip(WHITESPACE + ",;")
        if (yield from stream.peek()) != "{":
            return
        yield from read_json_call(stream, sink, only_known=only_known)


def skip_closers(stream: TextStream) -> Parse[None]:
    """Pass braces and brackets that are too many after a call, and white space."""
    yield from stream.skip(WHITESPACE + "}]")
    stream.mark_emitted()


def read_json_call(stream: TextStream, sink: EventSink, *, only_known: bool = False) -> Parse[None]:
    """Pass {"name": …, "arguments": {…}} and emit the call; "parameters" is another name of the arguments.

    A missing brace after the arguments is accepted. A call without the key "arguments" has no arguments.

    Args:
        only_known: whether it must have arguments and name a tool that the model was shown. Otherwise it may be any JSON.

    Raises:
        MalformedError: it is no call.
    """
    yield from stream.skip()
    yield from stream.expect("{")
    name = held = None
    while True:
        yield from stream.skip(WHITESPACE + ",")
        if (yield from stream.take("}")):
            break
        key = yield from _read_key(stream)
        if key in _NESTED and (yield from stream.peek()) == "{":
            yield from read_json_call(stream, sink, only_known=only_known)
            yield from _skip_to_brace(stream)
            return
        if key == "tool_calls" and (yield from stream.peek()) == "[":
            yield from read_json_calls(stream, sink, only_known=only_known)
            return
        if key in (*_NAMES, *_NESTED):
            name = yield from read_short_string(stream)
            if not name or (only_known and not sink.has_tool(name)):
                raise MalformedError
        elif key in _ARGUMENTS and name is not None:
            yield from emit_arguments(stream, sink, name)
            yield from _skip_to_brace(stream)
            return
        elif key in _ARGUMENTS:
            held = _object_text((yield from read_json_value(stream)))
        else:
            yield from read_json_value(stream)
        yield from stream.skip()
        char = yield from stream.peek()
        if name is not None and not only_known and char and char in _AFTER_NAME:
            break
        if char not in ("}", ",", '"', "'"):
            raise MalformedError
    if name is None or (held is None and only_known):
        raise MalformedError
    stream.mark_emitted()
    with sink.call(name):
        sink.arguments(held or "{}")


def _read_key(stream: TextStream) -> Parse[str]:
    key = yield from read_short_string(stream)
    yield from stream.skip()
    yield from stream.expect(":")
    yield from stream.skip()
    return key


def emit_object_call(
    stream: TextStream, sink: EventSink, name: str, call_id: str | None = None, raw: RawQuotes | None = None
) -> Parse[None]:
    """Pass the arguments of a call, which must be an object, and emit the call.

    Args:
        raw: as for `emit_json_object`.

    Raises:
        MalformedError: they are something else, or the name is empty; no call was emitted.
    """
    if not name or (yield from stream.peek()) != "{":
        raise MalformedError
    stream.mark_emitted()
    with sink.call(name, call_id):
        yield from emit_json_object(stream, sink.arguments, raw=raw)


def emit_arguments(stream: TextStream, sink: EventSink, name: str, call_id: str | None = None) -> Parse[None]:
    """Pass the arguments of a call and emit the call.

    The arguments are an object, a string that holds one, or null or an empty string or list, which mean no arguments.

    Raises:
        MalformedError: they are something else; no call was emitted.
    """
    if (yield from stream.peek()) == "{":
        yield from emit_object_call(stream, sink, name, call_id)
        return
    text = _object_text((yield from read_json_value(stream)))
    stream.mark_emitted()
    with sink.call(name, call_id):
        sink.arguments(text)


def _object_text(value: str) -> str:
    """Return the JSON object that a value is or holds."""
    try:
        given = json.loads(value)
        if isinstance(given, str) and given.strip():
            value = parse_json(given) or ""
            given = json.loads(value)
    except (ValueError, RecursionError):
        raise MalformedError from None
    if given is None or given in ("", []):
        return "{}"
    if isinstance(given, list) and len(given) == 1:
        given, value = given[0], json.dumps(given[0], ensure_ascii=False)
    if not isinstance(given, dict):
        raise MalformedError
    return value


def _skip_to_brace(stream: TextStream) -> Parse[None]:
    """Pass what follows the arguments up to the brace if it is well-formed; otherwise pass nothing."""
    stream.mark_emitted()
    yield from stream.skip()
    while (yield from stream.take(",")):
        yield from stream.skip(WHITESPACE + ",")
        char = yield from stream.peek()
        if char == "" or char not in "\"'":
            break
        yield from _read_key(stream)
        yield from read_json_value(stream)
        yield from stream.skip()
    if not (yield from stream.take("}")):
        return
    stream.mark_emitted()


def json_call_head(name: str, arguments: str = "arguments") -> str:
    """Return the text before the arguments."""
    return f'{{"name": {json.dumps(name)}, "{arguments}": '


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCallList:
    """Describes the calls of a model family. Many families differ only in the marks and in the layout.

    Parsing accepts a list or single objects, in a code fence or not, with the end mark or without.

    Attributes:
        open_marks: marks that begin calls; the grammar writes the first. A "[" at a mark's end is the list's.
        close_marks: marks that end calls.
        only_known: whether calls must have arguments and name an offered tool. For marks that may also begin ordinary text.
        before, between, after: texts around and between the calls, as the model was trained on them.
        head, tail: texts around the arguments of one call; "NAME" in `head` is replaced by the quoted name.
    """

    open_marks: tuple[str, ...]
    close_marks: tuple[str, ...] = ()
    only_known: bool = False
    before: str = ""
    between: str = ", "
    after: str = ""
    head: str = '{"name": NAME, "arguments": '
    tail: str = "}"

    @property
    def parsers(self) -> dict[str, ParseMarkup]:
        """The opening marks with their parsers."""
        return {mark: including_mark(self.read_calls, mark.endswith("[")) for mark in self.open_marks}

    def read_calls(self, stream: TextStream, sink: EventSink) -> Parse[None]:
        """Parse the calls and the end mark.

        Raises:
            MalformedError: the text is no call.
        """
        yield from read_json_calls(stream, sink, only_known=self.only_known)
        while (yield from stream.peek()) != "" and (yield from self._take_close(stream)):  # models may repeat the end mark
            yield from stream.skip()

    def _take_close(self, stream: TextStream) -> Parse[bool]:
        """Pass an end mark, or the beginning of one at the end of the text. Return whether there was one."""
        for mark in self.close_marks:
            if (yield from stream.take_or_end(mark)):
                return True
        return False

    def format_of(self, signs: tuple[str, ...], tokens: tuple[str, ...]) -> ToolCallFormat:
        """Return the format of these calls, which begin with the first of `tokens`."""
        return ToolCallFormat(self.parsers, signs, tokens, self.calls_grammar, tokens[0])

    @property
    def calls_grammar(self) -> BuildCallGrammar:
        """Function that builds the grammar of the calls and of the marks around them."""
        before, after = self.open_marks[0].removesuffix("[") + self.before, self.after
        if not self.before:  # no text surrounds a list of calls, so that each call is between marks of its own
            return call_list(lambda grammar, tool: grammar.call(before + self.head_of(tool), tool, self.tail + after), self.between)
        return call_list(lambda grammar, tool: grammar.call(self.head_of(tool), tool, self.tail), self.between, before, after)

    def head_of(self, tool: Tool) -> str:
        """Return the text before the arguments of a call."""
        return self.head.replace("NAME", json.dumps(tool.name))
