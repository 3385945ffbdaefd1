"""<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>: Qwen3-Coder and Qwen 3.5."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.server.dialogue.request import Tool
from paceline.server.markup.answer import Markers
from paceline.server.markup.call_grammar import CallGrammar, arguments_schema
from paceline.server.markup.json_text import inside
from paceline.server.markup.source import MalformedError, Reading, Source
from paceline.server.markup.typed_values import is_text, parameter_schema, value_text
from paceline.server.markup.writer import Writer

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def read_calls(source: Source, writer: Writer) -> Reading[None]:
    yield from source.skip()
    yield from source.expect(FUNCTION)
    yield from _read_function(source, writer)
    yield from source.skip()
    while writer.may_call and (yield from source.take(FUNCTION)):
        yield from _read_function(source, writer)
        yield from source.skip()
    if not (yield from source.take_end(CLOSE)):
        raise MalformedError


def read_bare_call(source: Source, writer: Writer) -> Reading[None]:
    """Without <tool_call>, which these models leave out now and then."""
    yield from _read_function(source, writer)
    yield from source.skip()
    yield from source.take_end(CLOSE)


def _read_function(source: Source, writer: Writer) -> Reading[None]:
    name = _checked((yield from source.until(">")))
    source.settle()
    with writer.call(name):
        writer.arguments("{")
        yield from source.skip()
        before = ""
        while (yield from source.take(PARAMETER)):
            key = _checked((yield from source.until(">")))
            source.settle()
            writer.arguments(f'{before}"{inside(key)}": ')
            yield from _read_value(source, writer, parameter_schema(writer.schema_of(name), key))
            yield from source.skip()
            before = ", "
        if not (yield from source.take_end(FUNCTION_END)):
            raise MalformedError
        writer.arguments("}")
        source.settle()


def _read_value(source: Source, writer: Writer, schema: Mapping[str, Any] | None) -> Reading[None]:
    """One value: a text is told as it comes, anything else when it is whole. The line ends at its borders are markup."""
    yield from source.take("\n")
    source.settle()
    streams = is_text(schema)
    parts: list[str] = []
    tell = _quoted(writer) if streams else parts.append
    if streams:
        writer.arguments('"')
    end = yield from source.told_until(("\n" + PARAMETER_END, PARAMETER_END), tell)
    if end is None:
        writer.text("".join(parts))
        raise MalformedError
    source.at += len(end)
    writer.arguments('"' if streams else value_text("".join(parts), schema))
    source.settle()


def _quoted(writer: Writer) -> Callable[[str], None]:
    return lambda part: writer.arguments(inside(part))


def _checked(name: str) -> str:
    if not name or not name.isprintable() or "<" in name:
        raise MalformedError
    return name


MARKERS = Markers(anywhere={OPEN: read_calls, FUNCTION: read_bare_call})


def calls_grammar(grammar: CallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Parameters come in the schema's order; texts are held to their `enum` alone."""
    closing = grammar.text(f"{FUNCTION_END}\n{CLOSE}")
    heads = [grammar.text(f"{OPEN}\n{FUNCTION}{tool.name}>\n") for tool in tools]
    calls = [f"{head} {_parameters(grammar, tool)} {closing}" for head, tool in zip(heads, tools, strict=True)]
    return grammar.listed(calls, "\n", several=several)


def _parameters(grammar: CallGrammar, tool: Tool) -> str:
    root = arguments_schema(tool)
    required, parts = root.get("required") or (), []
    for name in root.get("properties") or ():
        schema = parameter_schema(root, name) or {}
        opening = grammar.text(f"{PARAMETER}{name}>\n")
        one = grammar.rule(f"{opening} {_value(grammar, root, schema)}")
        parts.append(one if name in required else f"{one}?")
    return " ".join(parts)


def _value(grammar: CallGrammar, root: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    end = f"\n{PARAMETER_END}\n"
    if not is_text(schema):
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return f"{grammar.json({**definitions, **schema})} {grammar.text(end)}"
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return f"{grammar.one_of([grammar.text(str(value)) for value in values])} {grammar.text(end)}"
    return grammar.until(end)
