"""<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>: Qwen3-Coder and Qwen 3.5."""

from collections.abc import Callable, Mapping
from typing import Any

from paceline.server.markup.answer import Markers
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
