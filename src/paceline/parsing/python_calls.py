"""Parses calls that are written as Python, f(a='x', n=3), alone or in a list.

A call is parsed when it is complete. If that fails, the rest of its block is parsed as a whole. An unescaped quote within a string is then
accepted if the call can be parsed in exactly one way, and calls that can be parsed are kept even if others cannot.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.parsing.events import EventSink
from paceline.parsing.python_literals import QUOTES, LiteralReader
from paceline.parsing.text_stream import NAME_CHARACTER, WHITESPACE, MalformedError, Parse, TextStream

_CALL = re.compile(r"([\w.\-]+)\s*\((.*)\)", re.DOTALL)
_MARK = re.compile(r"\\.|['\"()\[\]{},;\n]", re.DOTALL)  # escapes, quotes, brackets, separators
_AFTER_STRING = ",)]}:"
_BETWEEN = WHITESPACE + ",;"
_MAX_REPAIR_CHARS = 16384
_MAX_CANDIDATES = 16  # each one costs a pass over the call
_PRINT = "print"
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

    ends: tuple[str, ...] = ()
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
            yield from self._read_call(stream, sink, num_calls)
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

    def _read_call(self, stream: TextStream, sink: EventSink, num_calls: int) -> Parse[None]:
        begin = stream.position
        name = yield from stream.matching(NAME_CHARACTER)
        yield from stream.skip()
        if not name or not (yield from stream.take("(")):
            if num_calls and stream.has_ended and stream.at == len(stream.text):
                return
            raise MalformedError
        if self.is_code and name == _PRINT and name not in sink.tool_names:
            yield from stream.skip()
            yield from self._read_call(stream, sink, num_calls)
            yield from stream.skip()
            yield from stream.take(")")
            return
        name = self._tool_name(name, sink)
        start = stream.position
        is_closed = yield from self._pass_arguments(stream)
        is_cut = not is_closed and stream.has_ended and stream.at == len(stream.text)
        reader = LiteralReader(stream.text[start - stream.num_dropped : stream.at])
        try:
            reader.read_arguments(sink.schema_of(name))
            is_read = is_closed or is_cut
        except MalformedError:
            is_read = is_cut and reader.at == len(reader.text)
        has_parenthesis = is_closed and (yield from stream.take(")"))
        if is_read and (has_parenthesis or is_cut or reader.text.strip()):
            stream.mark_emitted()
            with sink.call(name):
                sink.arguments("".join(reader.parts))
        else:
            yield from self._recover(stream, sink, begin, num_calls)

    def _pass_arguments(self, stream: TextStream) -> Parse[bool]:
        """Pass the text up to the parenthesis after it, or up to the end of the list or block where that is missing.

        Returns whether one of them comes next. Otherwise the text has ended, or a quote within a string ends it.
        """
        depth, quote = 0, ""
        while (char := (yield from stream.peek())) != "":
            if plain := _run_without(f"{quote[:1]}\\" if quote else "'\"()[]{}", self.ends).match(stream.text, stream.at):
                stream.at = plain.end()
            elif quote and char == "\\":
                yield from stream.wait(2)
                stream.at = min(stream.at + 2, len(stream.text))
            elif quote and (yield from stream.take(quote)):
                quote = ""
                yield from stream.skip()
                if (yield from stream.peek()) not in ("", *_AFTER_STRING, *QUOTES) and (yield from stream.one_of(self.ends)) is None:
                    return False
            elif (not quote or self.ends_strings) and (yield from stream.one_of(self.ends)) is not None:
                return not quote
            elif not quote and char in QUOTES:
                quote = char * 3 if (yield from stream.take(char * 3)) else char
                stream.at += len(quote) % 3
            elif not quote and not depth and char in ")]}":
                return char != "}"
            else:
                depth += 0 if quote else (char in "([{") - (char in ")]}")
                stream.at += 1
        return False

    def _tool_name(self, name: str, sink: EventSink) -> str:
        """Return the name of the tool; in code the module before it is left out."""
        if self.is_code and name not in sink.tool_names:
            name = name.rpartition(".")[2]
        if self.only_known and sink.tool_names and name not in sink.tool_names:
            raise MalformedError
        return name

    def _recover(self, stream: TextStream, sink: EventSink, begin: int, num_calls: int) -> Parse[None]:
        """Read the rest of the block, from the call at `begin` on, as a whole."""
        stream.at = begin - stream.num_dropped
        yield from _pass_until(stream, self.ends)
        segments = self._best_split(stream.text[begin - stream.num_dropped : stream.at], sink)
        if not num_calls and not any(found for _, found in segments):
            raise MalformedError
        stream.mark_emitted()
        for text, found in segments:
            if found and sink.can_call:
                with sink.call(found[0]):
                    sink.arguments(found[1])
            else:
                sink.text(text)

    def _best_split(self, block: str, sink: EventSink) -> list[Segment]:
        """Return the calls of a block: brackets within strings count or do not, whichever gives more calls."""
        if len(block) > _MAX_REPAIR_CHARS:
            return [(block, None)]
        splits = [[(text, self._repaired(text, sink)) for text in _split(block, in_strings=in_strings)] for in_strings in (True, False)]
        return max(splits, key=lambda segments: sum(found is not None for _, found in segments))

    def _repaired(self, text: str, sink: EventSink) -> tuple[str, str] | None:
        """Return the name and the arguments of a call, if it can be read in exactly one way."""
        written = _CALL.fullmatch(text)
        if written is None:
            return None
        try:
            name = self._tool_name(written[1], sink)
        except MalformedError:
            return None
        schema = sink.schema_of(name)
        arguments, string_start = _arguments_json(written[2], schema)
        if arguments is None and string_start >= 0:
            found = [one for text in _requoted(written[2], string_start) if (one := _arguments_json(text, schema)[0]) is not None]
            arguments = found[0] if len(found) == 1 else None
        return None if arguments is None else (name, arguments)


def _arguments_json(text: str, schema: Mapping[str, Any] | None) -> tuple[str | None, int]:
    """Return arguments as JSON, None if they are none, and where the last string begins that was read."""
    reader = LiteralReader(text)
    try:
        reader.read_arguments(schema)
    except MalformedError:
        return None, reader.string_start
    return "".join(reader.parts), reader.string_start


@cache
def _run_without(characters: str, ends: tuple[str, ...]) -> "re.Pattern[str]":
    """Return a pattern of a run without characters and the first characters of `ends`."""
    return re.compile(f"[^{re.escape(characters + ''.join(end[0] for end in ends))}]+")


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
    depth = start = 0
    quote = ""
    for mark in _MARK.finditer(block):
        char, at = mark[0] if quote else mark[0][-1], mark.end() - 1
        if quote:
            quote = "" if char == quote else quote
        elif char in QUOTES and not in_strings:
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth < 0:
                block = block[:at]
                break
        elif char in ",;\n" and depth == 0:
            if block[start:at].strip():
                yield block[start:at].strip()
            start = at + 1
    if block[start:].strip():
        yield block[start:].strip()


def _requoted(text: str, start: int) -> Iterator[str]:
    """Yield the text with the string at `start` ended at each quote that may end it, and the quotes before it escaped."""
    quote, places, at = text[start], list[int](), start + 1
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == quote:
            places.append(at)
        at += 1
    ends = [place for place in places if text[place + 1 :].lstrip(WHITESPACE)[:1] in ("", *_AFTER_STRING)]
    for end in ends if len(ends) <= _MAX_CANDIDATES else ():
        inside = [place for place in places if place < end]
        pieces = [text[left + 1 : right] for left, right in zip([start, *inside], [*inside, end], strict=True)]
        yield text[: start + 1] + f"\\{quote}".join(pieces) + text[end:]
