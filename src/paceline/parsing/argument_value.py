"""Values of arguments that are written as plain text between marks: their JSON, and the grammar of what a schema allows."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.parsing.argument_types import coerce_argument, is_text
from paceline.parsing.event_sink import EventSink
from paceline.parsing.lenient_json import escape_json
from paceline.parsing.text_stream import Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar


class ArgumentValue:
    """Emits a value from its parts: a text as the parts come, any other value when it is whole."""

    def __init__(self, sink: EventSink, schema: Mapping[str, Any] | None) -> None:
        self._sink, self._schema = sink, schema
        self._parts: list[str] | None = None if is_text(schema) else []
        if self._parts is None:
            sink.arguments('"')

    def add(self, part: str) -> None:
        """Add a part of the value."""
        if self._parts is None:
            self._sink.arguments(escape_json(part))
        else:
            self._parts.append(part)

    def end(self, *, is_whole: bool) -> None:
        """End the value; a text that is not whole is left open, so that its call counts as incomplete."""
        if self._parts is not None:
            self._sink.arguments(coerce_argument("".join(self._parts), self._schema))
        elif is_whole:
            self._sink.arguments('"')


def read_value(stream: TextStream, sink: EventSink, schema: Mapping[str, Any] | None, ends: Sequence[str]) -> Parse[None]:
    """Pass a value and one of `ends`, and emit the value; it also ends where the text ends."""
    stream.mark_emitted()
    value = ArgumentValue(sink, schema)
    end = yield from stream.emit_until(ends, value.add)
    value.end(is_whole=end is not None)
    stream.at += len(end or "")
    stream.mark_emitted()


def value_grammar(grammar: ToolCallGrammar, root: Mapping[str, Any], schema: Mapping[str, Any], end: str) -> str:
    """Return a grammar of a value and `end`. Of a text only its `enum` is enforced.

    Args:
        root: the schema within which references are resolved.
    """
    if not is_text(schema):
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return f"{grammar.json({**definitions, **schema})} {grammar.text(end)}"
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return f"{grammar.one_of([grammar.text(str(value)) for value in values])} {grammar.text(end)}"
    return grammar.until(end)
