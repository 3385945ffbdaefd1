"""How an answer is read whose thoughts and calls stand between markers: which reader gets which part."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.parsing.event_sink import EventSink
from paceline.parsing.text_stream import WHITESPACE, MalformedError, Parse, TextStream

ParseMarkup = Callable[[TextStream, EventSink], Parse[None]]
"""Reads what stands behind a marker, and tells it. Raises MalformedError: what was not told by then is text, the marker included."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The markers of a format, and who reads on behind them.

    Attributes:
        anywhere: those that mean something wherever they stand.
        first: those that do so only in front of all text.
    """

    anywhere: Mapping[str, ParseMarkup] = field(default_factory=dict)
    first: Mapping[str, ParseMarkup] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutputParser:
    """Reads a whole answer.

    White space between markers, and between a marker and text, is markup.

    Args:
        thoughts, calls: the markers of either.
        opened: reads thoughts that the prompt has opened; None = it has not.
    """

    thoughts: Markers
    calls: Markers
    opened: ParseMarkup | None = None

    def read(self, stream: TextStream, sink: EventSink) -> Parse[None]:
        """Read to the end."""
        is_behind = self.opened is not None and (yield from _read(self.opened, stream, sink))
        while True:
            reader = yield from self._first(stream, sink, is_behind=is_behind)
            if reader is None:
                readers = self._anywhere(sink)
                marker = yield from stream.emit_until(tuple(readers), sink.text, held=WHITESPACE if readers else "")
                if marker is None:
                    return
                stream.at += len(marker)
                reader = readers[marker]
            is_behind = yield from _read(reader, stream, sink)

    def _first(self, stream: TextStream, sink: EventSink, *, is_behind: bool) -> Parse[ParseMarkup | None]:
        """The reader of the marker in front of the text, which is passed; behind markup, so is white space in front of text."""
        readers = self._anywhere(sink)
        if not sink.has_text and not sink.num_calls:
            readers |= {} if is_behind else self.thoughts.first
            readers |= self.calls.first if sink.can_call else {}
        if not readers and not is_behind:
            return None
        yield from stream.skip()
        marker = yield from stream.one_of(tuple(readers))
        if is_behind:
            stream.mark_emitted()
        if marker is None:
            stream.at = stream.num_emitted
            return None
        stream.at += len(marker)
        return readers[marker]

    def _anywhere(self, sink: EventSink) -> dict[str, ParseMarkup]:
        return {**self.thoughts.anywhere, **(self.calls.anywhere if sink.can_call else {})}


def _read(reader: ParseMarkup, stream: TextStream, sink: EventSink) -> Parse[bool]:
    """Whether markup was read; else it was told as text."""
    try:
        yield from reader(stream, sink)
        return True
    except MalformedError:
        sink.text(stream.unemitted)
        return False
    finally:
        stream.mark_emitted()
