"""Opening marks of reasoning and calls, and the parsers of what follows them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.parsing.event_sink import EventSink
from paceline.parsing.text_stream import Parse, TextStream

ParseMarkup = Callable[[TextStream, EventSink], Parse[None]]
"""Parses what follows a mark. After MalformedError, what was passed and not emitted is text, the mark included."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The opening marks of a format, with their parsers.

    Attributes:
        anywhere: marks that are markup anywhere in the text.
        first: marks that are markup only before all text.
    """

    anywhere: Mapping[str, ParseMarkup] = field(default_factory=dict)
    first: Mapping[str, ParseMarkup] = field(default_factory=dict)
