"""Opening marks of reasoning and calls, and the parsers of what follows them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.parsing.event_sink import EventSink
from paceline.parsing.text_stream import Parse, TextStream

ParseMarkup = Callable[[TextStream, EventSink], Parse[None]]
"""Parses what follows a mark. After MalformedError, what was passed and not emitted is text, the mark included."""


def including_mark(parse: ParseMarkup, num_chars: int) -> ParseMarkup:
    """Return a parser of markup that begins with the last `num_chars` characters of the mark."""

    def parse_from_mark(stream: TextStream, sink: EventSink) -> Parse[None]:
        stream.at -= num_chars
        yield from parse(stream, sink)

    return parse_from_mark


def section_of(mark: str, parse_call: ParseMarkup, close: str) -> ParseMarkup:
    """Return a parser of calls that each begin with `mark`, and of the end mark after them. The first `mark` may be missing."""

    def parse_section(stream: TextStream, sink: EventSink) -> Parse[None]:
        yield from stream.skip()
        yield from stream.take(mark)
        yield from parse_call(stream, sink)
        while sink.can_call and (yield from stream.take(mark)):
            yield from parse_call(stream, sink)
        yield from stream.take_or_end(close)

    return parse_section


@dataclass(frozen=True, slots=True)
class Markers:
    """The opening marks of a format, with their parsers.

    Attributes:
        anywhere: marks that are markup anywhere in the text.
        first: marks that are markup only before all text.
    """

    anywhere: Mapping[str, ParseMarkup] = field(default_factory=dict)
    first: Mapping[str, ParseMarkup] = field(default_factory=dict)
