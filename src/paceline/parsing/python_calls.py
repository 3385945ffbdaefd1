"""Parses calls that are written as Python, f(a='x', n=3), alone or in a list.

A call is parsed while it arrives. If that fails, the rest of its block is parsed as a whole. An unescaped quote within a string is then
accepted if the call can be parsed in exactly one way, and calls that can be parsed are kept even if others cannot.
"""

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.parsing.argument_types import parameter_schema
from paceline.parsing.event_sink import EventSink
from paceline.parsing.held_call import HeldCall
from paceline.parsing.lenient_json import escape_json
from paceline.parsing.python_literals import AFTER_STRING, BrokenStringError, LiteralReader
from paceline.parsing.text_stream import WHITESPACE, Emit, MalformedError, Parse, TextStream

_NAME = re.compile(r"[\w.\-]")
_KEY = re.compile(r"[^\s=,()'\"\[\]{}*]")
_BETWEEN = WHITESPACE + ",;"
_MAX_REPAIR_CHARS = 16384
_MAX_CANDIDATES = 16  # each one costs a pass over the call
_PRINT = "print"
Result = TypeVar("Result")
Segment = tuple[str, tuple[str, str] | None]
"""The text of a call, with its name and arguments if it can be read."""


@dataclass(frozen=True, slots=True)
class CallListReader:
    """Reads calls up to the end of their block.

    Args:
        ends: what ends a block; none = the answer's end.
        ends_strings: whether `ends` end a block within a string as well, as special tokens do.
        only_known: whether calls of unknown tools are text.
        is_code: whether calls may be within print() and after a module's name.
    """

    ends: Sequence[str] = ()
    ends_strings: bool = False
    only_known: bool = False
    is_code: bool = False

    def read(self, stream: TextStream, sink: EventSink, *, is_bracketed: bool = False) -> Parse[None]:
        """Pass the calls and the end of the block, and emit the calls.

        Args:
            is_bracketed: whether the bracket of the list is passed.

        Raises:
            MalformedError: there is no call, or there is text between calls.
        """
        yield from stream.skip()
        is_bracketed = is_bracketed or (yield from stream.take("["))
        num_calls = 0
        while not num_calls or sink.can_call:
            yield from stream.skip(_BETWEEN)
            if (yield from self._is_over(stream, is_bracketed=is_bracketed)):
                break
            with ExitStack() as stack:
                yield from self._read_call(stream, sink, HeldCall(stream, sink, stack), num_calls)
            stream.mark_emitted()
            num_calls += 1
        else:
            yield from stream.skip()
            yield from stream.take("]")
        if not num_calls:
            raise MalformedError
        yield from self._pass_end(stream)

    def _is_over(self, stream: TextStream, *, is_bracketed: bool) -> Parse[bool]:
        if (yield from stream.peek()) == "" or (is_bracketed and (yield from stream.take("]"))):
            return True
        return (yield from stream.one_of(self.ends)) is not None

    def _pass_end(self, stream: TextStream) -> Parse[None]:
        if not self.ends:
            return
        yield from stream.skip()
        for end in self.ends:
            if (yield from stream.take_or_end(end)):
                return
        if (yield from stream.peek()) == "":  # a call whose beginning was cut off
            stream.mark_emitted()
            return
        raise MalformedError

    def _read_call(self, stream: TextStream, sink: EventSink, call: HeldCall, num_calls: int) -> Parse[None]:
        name = yield from stream.matching(_NAME)
        yield from stream.skip()
        if not name or not (yield from stream.take("(")):
            if num_calls and stream.has_ended and stream.at == len(stream.text):
                return
            raise MalformedError
        if self.is_code and name == _PRINT and name not in sink.tool_names:
            yield from stream.skip()
            with ExitStack() as stack:
                yield from self._read_call(stream, sink, HeldCall(stream, sink, stack), num_calls)
            yield from stream.skip()
            yield from stream.take(")")
            return
        call.name = self._tool_name(name, sink)
        try:
            yield from _read_arguments(stream, call.emit, sink.schema_of(call.name), LiteralReader(self.ends, self.ends_strings))
            call.open()
        except MalformedError:
            if stream.has_ended and stream.at == len(stream.text):
                call.open()
                raise
            yield from self._recover(stream, sink, call, num_calls)

    def _tool_name(self, name: str, sink: EventSink) -> str:
        """Return the name of the tool; in code the module before it is left out."""
        if self.is_code and name not in sink.tool_names:
            name = name.rpartition(".")[2]
        if self.only_known and sink.tool_names and name not in sink.tool_names:
            raise MalformedError
        return name

    def _recover(self, stream: TextStream, sink: EventSink, call: HeldCall, num_calls: int) -> Parse[None]:
        """Read the rest of the block, from the call on that was begun, as a whole."""
        yield from _pass_until(stream, self.ends)
        segments = self._best_split(call.source, sink)
        if not call.is_open:
            if not num_calls and not any(found for _, found in segments):
                raise MalformedError
            stream.mark_emitted()
            self._emit_segments(segments, sink)
            return
        (_, first), *others = segments
        stream.mark_emitted()
        if first:
            sink.arguments(first[1][call.num_emitted :])
            call.end()
            self._emit_segments(others, sink)
            return
        call.end()
        sink.text(", ".join(text for text, _ in others))
        yield from self._pass_end(stream)
        stream.mark_emitted()
        raise MalformedError

    def _best_split(self, block: str, sink: EventSink) -> list[Segment]:
        """Return the calls of a block: brackets within strings count or do not, whichever gives more calls."""
        if len(block) > _MAX_REPAIR_CHARS:
            return [(block, None)]
        splits = [[(text, self._repaired(text, sink)) for text in _split(block, in_strings=in_strings)] for in_strings in (True, False)]
        return max(splits, key=lambda segments: sum(found is not None for _, found in segments))

    def _emit_segments(self, segments: Sequence[Segment], sink: EventSink) -> None:
        for text, found in segments:
            if found and sink.can_call:
                with sink.call(found[0]):
                    sink.arguments(found[1])
            else:
                sink.text(text)

    def _repaired(self, text: str, sink: EventSink) -> tuple[str, str] | None:
        """Return the name and the arguments of a call, if it can be read in exactly one way."""
        try:
            return self._parse(text, sink, is_strict=True)
        except MalformedError:
            pass
        try:
            self._parse(text, sink, is_strict=False)
        except BrokenStringError as error:
            found = []
            for candidate in _requoted(text, error.place):
                try:
                    found.append(self._parse(candidate, sink, is_strict=True))
                except MalformedError:
                    continue
            return found[0] if len(found) == 1 else None
        except MalformedError:
            pass
        return None

    def _parse(self, text: str, sink: EventSink, *, is_strict: bool) -> tuple[str, str]:
        stream, parts = TextStream(text, has_ended=True), list[str]()
        name = _run(stream.matching(_NAME))
        _run(stream.skip())
        _run(stream.expect("("))
        name = self._tool_name(name, sink)
        _run(_read_arguments(stream, parts.append, sink.schema_of(name), LiteralReader(is_strict=is_strict)))
        if not name or stream.at < len(text) or not text.endswith(")"):
            raise MalformedError
        return name, "".join(parts)


def _read_arguments(stream: TextStream, emit: Emit, schema: Mapping[str, Any] | None, literals: LiteralReader) -> Parse[None]:
    """Pass the arguments of a call and the parenthesis after them, and emit them as an object.

    The parenthesis may be missing before the end of the block.
    """
    emit("{")
    before = ""
    while True:
        yield from stream.skip()
        if (yield from stream.take(")")):
            break
        if before and (yield from _at_end(stream, literals.ends)):
            break
        if (yield from stream.take("**")):
            before = yield from _read_unpacked(stream, emit, literals, before)
        else:
            key = yield from stream.matching(_KEY)
            yield from stream.skip()
            if not key:
                raise MalformedError
            yield from stream.expect("=")
            emit(f'{before}"{escape_json(key)}": ')
            yield from literals.read(stream, emit, parameter_schema(schema, key))
            before = ", "
        yield from stream.skip()
        if not (yield from stream.take(",")) and (yield from stream.peek()) != ")" and not (yield from _at_end(stream, literals.ends)):
            raise MalformedError
    emit("}")


def _read_unpacked(stream: TextStream, emit: Emit, literals: LiteralReader, before: str) -> Parse[str]:
    """Pass an object after ** and write its pairs; returns what to write before the next argument."""
    parts: list[str] = []
    yield from literals.read(stream, parts.append)
    given = json.loads("".join(parts))
    if not isinstance(given, dict):
        raise MalformedError
    for key, value in given.items():
        emit(f'{before}"{escape_json(key)}": ')
        emit(json.dumps(value, ensure_ascii=False))
        before = ", "
    return before


def _at_end(stream: TextStream, ends: Sequence[str]) -> Parse[bool]:
    return (yield from stream.peek()) in ("", "]") or (yield from stream.one_of(ends)) is not None


def _pass_until(stream: TextStream, ends: Sequence[str]) -> Parse[None]:
    """Pass everything before the first of `ends`, or before the end of the text."""
    longest = max(map(len, ends), default=1)
    while True:
        places = [place for place in (stream.text.find(end, stream.at) for end in ends) if place >= 0]
        if places or stream.has_ended:
            stream.at = min(places, default=len(stream.text))
            return
        stream.at = max(stream.at, len(stream.text) - longest + 1)
        yield


def _split(block: str, *, in_strings: bool) -> Iterator[str]:
    """Split at commas and line ends between calls.

    Args:
        in_strings: whether brackets within strings count, which needs no sound quotes.
    """
    depth = start = at = 0
    quote = ""
    while at < len(block):
        char = block[at]
        if quote:
            at += char == "\\"
            quote = "" if char == quote else quote
        elif char in "'\"" and not in_strings:
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth < 0:
                break
        elif char in ",;\n" and depth == 0:
            if block[start:at].strip():
                yield block[start:at].strip()
            start = at + 1
        at += 1
    if block[start:at].strip():
        yield block[start:at].strip()


def _requoted(text: str, start: int) -> Iterator[str]:
    """Yield the text with the string at `start` ended at each quote that may end it, and the quotes before it escaped."""
    quote, places, at = text[start], list[int](), start + 1
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == quote:
            places.append(at)
        at += 1
    ends = [place for place in places if text[place + 1 :].lstrip(WHITESPACE)[:1] in tuple(AFTER_STRING)]
    for end in ends if len(ends) <= _MAX_CANDIDATES else ():
        inside = [place for place in places if place < end]
        pieces = [text[left + 1 : right] for left, right in zip([start, *inside], [*inside, end], strict=True)]
        yield text[: start + 1] + f"\\{quote}".join(pieces) + text[end:]


def _run(reading: Generator[None, None, Result]) -> Result:
    """Return the result of a parser on a whole text."""
    try:
        next(reading)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a whole text is waited for")
