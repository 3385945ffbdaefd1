"""Values of arguments between tags, passed on as JSON that is complete even where the end tag is missing."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.parsing.argument_types import coerce_argument, is_text
from paceline.parsing.event_sink import EventSink
from paceline.parsing.lenient_json import escape_json
from paceline.parsing.text_stream import MalformedError, Parse, TextStream


def read_tagged_value(
    stream: TextStream, sink: EventSink, schema: Mapping[str, Any] | None, end: str, next_tags: Sequence[str] = ()
) -> Parse[None]:
    """Parse a value and `end`. A text is emitted as it arrives, any other value as a whole.

    Args:
        next_tags: tags that also end the value, because `end` is missing; they are not passed.

    Raises:
        MalformedError: the text ends within the value, which was closed.
    """
    stream.mark_emitted()
    streams = is_text(schema)
    parts: list[str] = []
    if streams:
        sink.arguments('"')
    found = yield from stream.emit_until((end, *next_tags), (lambda part: sink.arguments(escape_json(part))) if streams else parts.append)
    if found == end:
        stream.at += len(end)
    sink.arguments('"' if streams else coerce_argument("".join(parts), schema))
    stream.mark_emitted()
    if found is None:
        raise MalformedError
