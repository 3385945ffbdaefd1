"""<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>: Qwen3-Coder and Qwen 3.5."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.parsing.argument_types import parameter_schema
from paceline.parsing.argument_value import read_value, value_grammar
from paceline.parsing.event_sink import EventSink
from paceline.parsing.lenient_json import escape_json
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar, arguments_schema
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


@dataclass(frozen=True, slots=True)
class Tags:
    """How a function with its parameters is written.

    Attributes:
        function, parameter: what begins either, in front of its name.
        name_end: what ends a name.
        border: what stands around a value, besides its tags.
        parameter_end, function_end: what ends either.
    """

    function: str
    parameter: str
    name_end: str
    border: str
    parameter_end: str
    function_end: str


TAGS = Tags(FUNCTION, PARAMETER, ">", "\n", PARAMETER_END, FUNCTION_END)


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    yield from stream.expect(FUNCTION)
    yield from read_function(stream, sink, TAGS)
    yield from stream.skip()
    while sink.can_call and (yield from stream.take(FUNCTION)):
        yield from read_function(stream, sink, TAGS)
        yield from stream.skip()
    if not (yield from stream.take_or_end(CLOSE)):
        raise MalformedError


def read_bare_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Without <tool_call>, which these models leave out now and then."""
    yield from read_function(stream, sink, TAGS)
    yield from stream.skip()
    yield from stream.take_or_end(CLOSE)


def read_function(stream: TextStream, sink: EventSink, tags: Tags) -> Parse[None]:
    """A call whose beginning, in front of its name, is passed."""
    name = _checked((yield from stream.until(tags.name_end)))
    stream.mark_emitted()
    with sink.call(name):
        sink.arguments("{")
        yield from stream.skip()
        before = ""
        while (yield from stream.take(tags.parameter)):
            key = _checked((yield from stream.until(tags.name_end)))
            sink.arguments(f'{before}"{escape_json(key)}": ')
            yield from stream.take(tags.border)  # at the borders of a value it is markup
            ends = tuple(dict.fromkeys((tags.border + tags.parameter_end, tags.parameter_end)))
            yield from read_value(stream, sink, parameter_schema(sink.schema_of(name), key), ends)
            yield from stream.skip()
            before = ", "
        if not (yield from stream.take_or_end(tags.function_end)):
            raise MalformedError
        sink.arguments("}")
        stream.mark_emitted()


def _checked(name: str) -> str:
    if not name or not name.isprintable() or "<" in name:
        raise MalformedError
    return name


MARKERS = Markers(anywhere={OPEN: read_calls, FUNCTION: read_bare_call})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Parameters come in the schema's order; texts are held to their `enum` alone."""
    closing = grammar.text(f"{FUNCTION_END}\n{CLOSE}")
    heads = [grammar.text(f"{OPEN}\n{FUNCTION}{tool.name}>\n") for tool in tools]
    calls = [f"{head} {parameters_grammar(grammar, tool, TAGS)} {closing}" for head, tool in zip(heads, tools, strict=True)]
    return grammar.listed(calls, "\n", several=several)


def parameters_grammar(grammar: ToolCallGrammar, tool: Tool, tags: Tags) -> str:
    """All parameters of a tool, each on a line of its own."""
    root = arguments_schema(tool)
    required, parts = root.get("required") or (), []
    for name in root.get("properties") or ():
        schema = parameter_schema(root, name) or {}
        opening = grammar.text(f"{tags.parameter}{name}{tags.name_end}{tags.border}")
        one = grammar.rule(f"{opening} {value_grammar(grammar, root, schema, f'{tags.border}{tags.parameter_end}{chr(10)}')}")
        parts.append(one if name in required else f"{one}?")
    return " ".join(parts)
