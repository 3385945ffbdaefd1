"""How an answer is read whose thoughts and calls stand between markers: which reader gets which part."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.parsing.event_sink import Writer
from paceline.parsing.text_stream import SPACE, MalformedError, Reading, Source

ReadMarkup = Callable[[Source, Writer], Reading[None]]
"""Reads what stands behind a marker, and tells it. Raises MalformedError: what was not told by then is text, the marker included."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The markers of a format, and who reads on behind them.

    Attributes:
        anywhere: those that mean something wherever they stand.
        first: those that do so only in front of all text.
    """

    anywhere: Mapping[str, ReadMarkup] = field(default_factory=dict)
    first: Mapping[str, ReadMarkup] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Reads a whole answer.

    White space between markers, and between a marker and text, is markup.

    Args:
        thoughts, calls: the markers of either.
        opened: reads thoughts that the prompt has opened; None = it has not.
    """

    thoughts: Markers
    calls: Markers
    opened: ReadMarkup | None = None

    def read(self, source: Source, writer: Writer) -> Reading[None]:
        """Read to the end."""
        is_behind = self.opened is not None and (yield from _read(self.opened, source, writer))
        while True:
            reader = yield from self._first(source, writer, is_behind=is_behind)
            if reader is None:
                readers = self._anywhere(writer)
                marker = yield from source.told_until(tuple(readers), writer.text, held=SPACE if readers else "")
                if marker is None:
                    return
                source.at += len(marker)
                reader = readers[marker]
            is_behind = yield from _read(reader, source, writer)

    def _first(self, source: Source, writer: Writer, *, is_behind: bool) -> Reading[ReadMarkup | None]:
        """The reader of the marker in front of the text, which is passed; behind markup, so is white space in front of text."""
        readers = self._anywhere(writer)
        if not writer.has_text and not writer.num_calls:
            readers |= {} if is_behind else self.thoughts.first
            readers |= self.calls.first if writer.may_call else {}
        if not readers and not is_behind:
            return None
        yield from source.skip()
        marker = yield from source.one_of(tuple(readers))
        if is_behind:
            source.settle()
        if marker is None:
            source.at = source.told
            return None
        source.at += len(marker)
        return readers[marker]

    def _anywhere(self, writer: Writer) -> dict[str, ReadMarkup]:
        return {**self.thoughts.anywhere, **(self.calls.anywhere if writer.may_call else {})}


def _read(reader: ReadMarkup, source: Source, writer: Writer) -> Reading[bool]:
    """Whether markup was read; else it was told as text."""
    try:
        yield from reader(source, writer)
        return True
    except MalformedError:
        writer.text(source.untold)
        return False
    finally:
        source.settle()
