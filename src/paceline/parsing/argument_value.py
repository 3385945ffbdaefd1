"""Values of arguments written as plain text between two texts: read into JSON, and what they may be under a schema."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.parsing.argument_types import coerce_argument, is_text
from paceline.parsing.event_sink import EventSink
from paceline.parsing.lenient_json import escape_json
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar


def read_value(stream: TextStream, sink: EventSink, schema: Mapping[str, Any] | None, ends: Sequence[str]) -> Parse[None]:
    """Pass a value and one of `ends`, and tell it: a text as it comes, anything else when it is whole.

    Raises:
        MalformedError: the text ends within it.
    """
    stream.mark_emitted()
    streams = is_text(schema)
    parts: list[str] = []

    def tell(part: str) -> None:
        if streams:
            sink.arguments(escape_json(part))
        else:
            parts.append(part)

    if streams:
        sink.arguments('"')
    end = yield from stream.emit_until(ends, tell)
    if end is None:
        sink.text("".join(parts))
        raise MalformedError
    stream.at += len(end)
    sink.arguments('"' if streams else coerce_argument("".join(parts), schema))
    stream.mark_emitted()


def value_grammar(grammar: ToolCallGrammar, root: Mapping[str, Any], schema: Mapping[str, Any], end: str) -> str:
    """What matches a value and `end`; a text is held to its `enum` alone.

    Args:
        root: the schema that references in `schema` lead into.
    """
    if not is_text(schema):
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return f"{grammar.json({**definitions, **schema})} {grammar.text(end)}"
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return f"{grammar.one_of([grammar.text(str(value)) for value in values])} {grammar.text(end)}"
    return grammar.until(end)
