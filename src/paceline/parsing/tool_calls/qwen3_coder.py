"""<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>: Qwen3-Coder, Qwen 3.5 and Nemotron 3."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.parsing.argument_types import parameter_schema, resolve_ref
from paceline.parsing.argument_value import value_grammar
from paceline.parsing.end_mark import pass_end_mark, skip_repeated_mark
from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.json_call import read_json_calls
from paceline.parsing.lenient_json import escape_json
from paceline.parsing.output_parser import Markers
from paceline.parsing.tagged_values import TaggedValues, ValueTags
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar, arguments_schema
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n\"']")


@dataclass(frozen=True, slots=True)
class Tags:
    """How a function with its parameters is written.

    Attributes:
        function, parameter: what begins either, before its name.
        name_end: what ends a name.
        border: what is written around a value, within its tags.
        parameter_end, function_end: what ends either.
        calls_begin, calls_end: what begins and ends a block of calls.
    """

    function: str
    parameter: str
    name_end: str
    border: str
    parameter_end: str
    function_end: str
    calls_end: str = CLOSE
    calls_begin: str = OPEN

    @property
    def of_values(self) -> ValueTags:
        """The tags that a value may end with."""
        ends = (self.function_end, self.calls_end)
        return ValueTags(self.parameter, self.parameter_end, self.function, ends, self.border, self.calls_begin)


TAGS = Tags(FUNCTION, PARAMETER, ">", "\n", PARAMETER_END, FUNCTION_END)


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse what follows one or more opening marks. A call may also be written as JSON."""
    yield from skip_repeated_mark(stream, OPEN)
    char = yield from stream.peek()
    if sink.num_calls and char == "":  # an opening mark where a closing one should be
        return
    if char and char in "{[`":
        yield from read_json_calls(stream, sink)
        yield from pass_end_mark(stream, CLOSE)
        return
    yield from stream.expect(FUNCTION)
    yield from read_functions(stream, sink, TAGS)


def read_functions(stream: TextStream, sink: EventSink, tags: Tags) -> Parse[None]:
    """Parse all functions of a block, the first of which was begun, and the end mark."""
    yield from read_function(stream, sink, tags)
    yield from stream.skip()
    while sink.can_call and (yield from stream.take(tags.function)):
        yield from read_function(stream, sink, tags)
        yield from stream.skip()
    yield from pass_end_mark(stream, tags.calls_end)


def read_bare_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse a call without <tool_call>, which these models leave out at times."""
    yield from read_functions(stream, sink, TAGS)


def read_function(stream: TextStream, sink: EventSink, tags: Tags) -> Parse[None]:
    """Parse a call after the text before its name."""
    name = yield from _read_name(stream)
    has_end = yield from _pass_name_end(stream, tags)
    if not name or (not has_end and (yield from stream.peek()) not in ("\n", "<")):
        raise MalformedError
    stream.mark_emitted()
    with sink.call(name):
        sink.arguments("{")
        values, before = TaggedValues.of(stream, sink, tags.of_values), ""
        while True:
            yield from stream.skip()
            if (yield from stream.take(tags.parameter)):
                begin, key = stream.position, (yield from _read_name(stream))
                if not (yield from _pass_name_end(stream, tags)):
                    yield from values.skip(begin)
                    continue
                sink.arguments(f'{before}"{escape_json(key)}": ')
                yield from values.read(parameter_schema(sink.schema_of(name), key), begin)
                before = ", "
            elif not (yield from stream.take(tags.parameter_end)):
                break
        stream.mark_emitted()
    yield from stream.take_or_end(tags.function_end)
    stream.mark_emitted()


def _read_name(stream: TextStream) -> Parse[str]:
    yield from stream.skip(" \"'")
    return (yield from stream.matching(_NAME)).strip()


def _pass_name_end(stream: TextStream, tags: Tags) -> Parse[bool]:
    yield from stream.skip("\"'")
    return (yield from stream.take(tags.name_end.lstrip("\"'")))


MARKERS = Markers(anywhere={OPEN: read_calls, FUNCTION: read_bare_call})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Return a grammar of calls with parameters in the schema's order. Of texts only their `enum` is enforced."""
    closing = grammar.text(f"{FUNCTION_END}\n{CLOSE}")
    heads = [grammar.text(f"{OPEN}\n{FUNCTION}{tool.name}>\n") for tool in tools]
    calls = [f"{head} {parameters_grammar(grammar, tool, TAGS)} {closing}" for head, tool in zip(heads, tools, strict=True)]
    return grammar.listed(calls, "\n", several=several)


def parameters_grammar(grammar: ToolCallGrammar, tool: Tool, tags: Tags) -> str:
    """Return a grammar of all parameters of a tool, each on a line of its own."""
    root = arguments_schema(tool)
    required, parts = root.get("required") or (), []
    for name, property_schema in (root.get("properties") or {}).items():
        schema = resolve_ref(property_schema, root) if isinstance(property_schema, Mapping) else {}
        opening = grammar.text(f"{tags.parameter}{name}{tags.name_end}{tags.border}")
        one = grammar.rule(f"{opening} {value_grammar(grammar, root, schema, f'{tags.border}{tags.parameter_end}{chr(10)}')}")
        parts.append(one if name in required else f"{one}?")
    return " ".join(parts)


FORMAT = ToolCallFormat(MARKERS, (FUNCTION, PARAMETER, "!<seed:"), (OPEN, CLOSE), calls_grammar, OPEN)
