"""Values of arguments between tags, passed on as JSON that is complete even where the end tag is missing."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.parsing.argument_types import coerce_argument, is_text
from paceline.parsing.event_sink import EventSink
from paceline.parsing.lenient_json import escape_json
from paceline.parsing.text_stream import MalformedError, Parse, TextStream


def read_closed_value(
    stream: TextStream, sink: EventSink, key: str, schema: Mapping[str, Any] | None, end: str, next_tags: Sequence[str] = ()
) -> Parse[None]:
    """Parse a value and `end`, and emit it after `key`. A text is emitted as it arrives, any other value as a whole.

    Args:
        key: JSON before the value.
        next_tags: tags that also end the value, because `end` is missing; they are not passed.

    Raises:
        MalformedError: the text ends within the value, which was closed.
    """
    stream.mark_emitted()
    streams = is_text(schema)
    parts: list[str] = []
    if streams:
        sink.arguments(f'{key}"')
    tags = (end, *next_tags)

    def emit(part: str) -> None:
        part = _without_open_tag(part, tags) if stream.has_ended else part
        if streams:
            sink.arguments(escape_json(part))
        else:
            parts.append(part)

    found = yield from stream.emit_until(tags, emit)
    if found == end:
        stream.at += len(end)
    value = "".join(parts)
    if streams:
        sink.arguments('"')
    elif found is not None or value.strip():  # of a value that did not begin the key is left out
        sink.arguments(key + coerce_argument(value, schema))
    stream.mark_emitted()
    if found is None:
        raise MalformedError


def _without_open_tag(text: str, tags: Sequence[str]) -> str:
    """Return a text without the beginning of a tag at its end."""
    for at in range(max(0, len(text) - max(map(len, tags))), len(text)):
        if any(tag.startswith(text[at:]) for tag in tags):
            return text[:at]
    return text
