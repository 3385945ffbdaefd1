"""<start_function_call>call:f{city:<escape>Paris<escape>,days:3}<end_function_call>: FunctionGemma."""

import json
from collections.abc import Mapping
from typing import Any

from paceline.parsing.argument_types import admits_text, coerce_argument, parameter_schema
from paceline.parsing.events import EventSink
from paceline.parsing.formats import ToolCallFormat, call_list
from paceline.parsing.json_call import skip_closers
from paceline.parsing.json_completer import JsonCompleter
from paceline.parsing.lenient_json import RawQuotes, emit_json_object
from paceline.parsing.text_stream import NAME_CHARACTER, MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import quoted_object_grammar

OPEN, CLOSE, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
_QUOTES = RawQuotes(QUOTE, OPEN, CLOSE)


def read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    yield from stream.take("call:")
    yield from stream.skip()
    name = yield from stream.matching(NAME_CHARACTER)
    yield from stream.skip()
    if not name or (yield from stream.peek()) != "{":
        raise MalformedError
    parts: list[str] = []
    with sink.call(name):
        yield from emit_json_object(stream, parts.append, raw=_QUOTES)
        sink.arguments(_typed("".join(parts), sink.schema_of(name)))
    yield from skip_closers(stream)
    if not (yield from stream.take_or_end(CLOSE)):
        raise MalformedError


def _typed(arguments: str, schema: Mapping[str, Any] | None) -> str:
    """Return arguments with the types of the schema. Arguments that break off are returned as they are."""
    completer = JsonCompleter()
    whole = completer.add(arguments)
    if completer.is_open:
        return arguments
    written = json.loads(whole)
    typed = _coerced(written, schema)
    return arguments if typed == written else json.dumps(typed, ensure_ascii=False)


def _coerced(value: Any, schema: Mapping[str, Any] | None) -> Any:
    if isinstance(value, dict):
        return {key: _coerced(one, parameter_schema(schema, key)) for key, one in value.items()}
    if schema is None or isinstance(value, list) or admits_text(schema) == isinstance(value, str):
        return value
    return json.loads(coerce_argument(value if isinstance(value, str) else json.dumps(value), schema))


calls_grammar = call_list(
    lambda grammar, tool: " ".join(
        (grammar.literal(f"{OPEN}call:{tool.name}"), quoted_object_grammar(grammar, tool, QUOTE), grammar.literal(CLOSE))
    )
)
FORMAT = ToolCallFormat({OPEN: read_call}, (OPEN,), (OPEN, CLOSE, QUOTE), calls_grammar, OPEN)
