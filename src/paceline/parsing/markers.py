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


@dataclass(frozen=True, slots=True)
class Markers:
    """The opening marks of a format, with their parsers.

    Attributes:
        anywhere: marks that are markup anywhere in the text.
        first: marks that are markup only before all text.
    """

    anywhere: Mapping[str, ParseMarkup] = field(default_factory=dict)
    first: Mapping[str, ParseMarkup] = field(default_factory=dict)
