"""Reads values of arguments between tags, <parameter=key>value</parameter>, if tags are missing or are part of a value.

A value ends at its closing tag. Three rules decide from the tags that follow what another tag means:

* An opening tag is text if the value is closed later, with opening and closing tags counted as brackets; otherwise it ends the value.
* A closing tag is text if other text and then another closing tag follow; otherwise it ends the value.
* The end mark of the call is text if the next tag closes the value; otherwise it ends the value.

Text is held back only from an unexpected tag until the deciding tags have arrived.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.parsing.argument_types import coerce_argument, is_text
from paceline.parsing.event_sink import EventSink
from paceline.parsing.lenient_json import escape_json
from paceline.parsing.text_stream import WHITESPACE, Emit, Parse, TextStream

_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&apos;": "'"}


@dataclass(frozen=True, slots=True)
class ValueTags:
    """The tags of values.

    Attributes:
        opening: what begins the next value.
        closing: what ends a value.
        call_opening: what begins another call, such as one in a text about calls.
        endings: what ends the call; the first one ends what `call_opening` begins.
        border: a line end, where one is written around a value and is not part of it. Before other tags it never is.
        block_opening: what begins a block of calls.
        is_xml: whether CDATA and entities are read, white space around a value is left out, and a value without an end is left out unless
            it is a string.
    """

    opening: str
    closing: str
    call_opening: str
    endings: tuple[str, ...]
    border: str = ""
    block_opening: str = ""
    is_xml: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        """All tags, without the border."""
        return tuple(tag for tag in (self.opening, self.closing, self.call_opening, self.block_opening, *self.endings) if tag)


class TaggedValues:
    """Parses the argument values of all tool calls of an answer."""

    def __init__(self, stream: TextStream, sink: EventSink, tags: ValueTags) -> None:
        self._stream, self._sink, self._tags = stream, sink, tags
        self._pattern = re.compile("|".join(map(re.escape, tags.all)))
        self._longest = max(map(len, tags.all))
        self._marks = (*tags.all, *("\n" + tag for tag in tags.all if tags.border or tag != tags.closing))
        self._marks += (_CDATA, *_ENTITIES) if tags.is_xml else ()
        self._found: list[tuple[int, str]] = []  # tags by their position
        self._num_searched = 0
        self._closed_at: dict[int, int | None] = {}  # of opening tags, by the position after them
        self._after_endings = (0, 0)
        self._text_until = 0

    @classmethod
    def of(cls, stream: TextStream, sink: EventSink, tags: ValueTags) -> "TaggedValues":
        """Return the reader of an answer's values, which is made for its first call."""
        if tags not in stream.kept:
            stream.kept[tags] = cls(stream, sink, tags)
        found: TaggedValues = stream.kept[tags]
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
        if is_whole or (value.strip() and not self._tags.is_xml):
            self._sink.arguments(head + coerce_argument(value, schema))

    def skip(self, begin: int) -> Parse[None]:
        """Pass a value as `read` does, without emitting it."""
        yield from self._read(lambda _: None, begin)

    def _read(self, emit: Emit, begin: int) -> Parse[bool]:
        """Return whether a tag ended the value."""
        stream, tags = self._stream, self._tags
        yield from stream.skip() if tags.is_xml else stream.take(tags.border)
        stream.mark_emitted()

        def emit_text(part: str) -> None:
            emit(_without_open_mark(part, self._marks) if stream.has_ended else part)

        while (mark := (yield from stream.emit_until(self._marks, emit_text, held=WHITESPACE if tags.is_xml else ""))) is not None:
            tag = mark if mark in tags.all else mark.removeprefix("\n")
            if tag in tags.all and (yield from self._ends_value(tag, stream.position + len(mark) - len(tag), begin)):
                stream.at += len(mark) if tag == tags.closing else len(mark) - len(tag)
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
        """Return whether the tag at `position` ends the value that begins at `begin`."""
        if position < self._text_until:
            return False
        if tag == self._tags.closing:
            if position == self._text_until:
                return True
            following = yield from self._next_tag(position + len(tag))
            return following is None or following[1] != tag or not self._has_text(position + len(tag), following[0])
        if tag in self._tags.endings:
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
        tags, open_values, num_calls = self._tags, [begin], 0
        self._closed_at[begin] = None
        while open_values and (found := (yield from self._next_tag(position))) is not None:
            position, tag = found[0] + len(found[1]), found[1]
            if tag == tags.closing:
                while open_values and open_values[-1] < 0:
                    open_values.pop()
                    num_calls -= 1
                if open_values:
                    self._closed_at[open_values.pop()] = found[0]
            elif tag == tags.opening:
                open_values.append(position)
                self._closed_at[position] = None
            elif tag == tags.call_opening:
                open_values.append(-1)
                num_calls += 1
            elif tag == tags.endings[0] and num_calls:
                while open_values.pop() >= 0:
                    pass
                num_calls -= 1
            elif tag in tags.endings and not (yield from self._is_text_ending(position)):
                return

    def _is_text_ending(self, position: int) -> Parse[bool]:
        """Return whether the next tag after the end mark before `position`, other end marks left out, closes a value."""
        if not self._after_endings[0] <= position <= self._after_endings[1]:
            first = position
            while (found := (yield from self._next_tag(position))) is not None and found[1] in self._tags.endings:
                position = found[0] + len(found[1])
            self._after_endings = (first, position)
        found = yield from self._next_tag(self._after_endings[1])
        return found is not None and found[1] == self._tags.closing

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
