"""Values of arguments written as plain text between two texts: read into JSON, and what they may be under a schema."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.parsing.argument_types import is_text, value_text
from paceline.parsing.event_sink import Writer
from paceline.parsing.lenient_json import inside
from paceline.parsing.text_stream import MalformedError, Reading, Source
from paceline.parsing.tool_call_grammar import CallGrammar


def read_value(source: Source, writer: Writer, schema: Mapping[str, Any] | None, ends: Sequence[str]) -> Reading[None]:
    """Pass a value and one of `ends`, and tell it: a text as it comes, anything else when it is whole.

    Raises:
        MalformedError: the text ends within it.
    """
    source.settle()
    streams = is_text(schema)
    parts: list[str] = []

    def tell(part: str) -> None:
        if streams:
            writer.arguments(inside(part))
        else:
            parts.append(part)

    if streams:
        writer.arguments('"')
    end = yield from source.told_until(ends, tell)
    if end is None:
        writer.text("".join(parts))
        raise MalformedError
    source.at += len(end)
    writer.arguments('"' if streams else value_text("".join(parts), schema))
    source.settle()


def value_grammar(grammar: CallGrammar, root: Mapping[str, Any], schema: Mapping[str, Any], end: str) -> str:
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
