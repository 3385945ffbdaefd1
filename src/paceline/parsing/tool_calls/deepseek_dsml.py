"""<｜DSML｜invoke name="…"><｜DSML｜parameter name="…" string="true">…</｜DSML｜parameter></｜DSML｜invoke>: DeepSeek V3.2 and V4.

V3.2 puts the calls into <｜DSML｜function_calls>, V4 into <｜DSML｜tool_calls>.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from paceline.parsing.argument_types import is_text, parameter_schema
from paceline.parsing.argument_value import value_grammar
from paceline.parsing.closed_value import read_closed_value
from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.json_call_list import take_any
from paceline.parsing.lenient_json import escape_json
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar, arguments_schema
from paceline.parsing.tools import Tool

DSML = "｜DSML｜"
BLOCKS = ("function_calls", "tool_calls")
_INVOKE, _INVOKE_END = f'<{DSML}invoke name="', f"</{DSML}invoke>"
_PARAMETER, _PARAMETER_END = f'<{DSML}parameter name="', f"</{DSML}parameter>"
_IS_TEXT, _IS_JSON = 'string="true"', 'string="false"'
_CLOSES = tuple(f"</{DSML}{block}>" for block in BLOCKS)
_NOT_TEXT = ("integer", "number", "boolean", "array", "object")


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    yield from stream.expect(_INVOKE)
    yield from _read_invoke(stream, sink)
    while sink.can_call and (yield from stream.take(_INVOKE)):
        yield from _read_invoke(stream, sink)
    yield from take_any(stream, _CLOSES)


def _read_invoke(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse one call, whose tag is passed up to the name."""
    name = yield from stream.until('">')
    if not name or not name.isprintable():
        raise MalformedError
    stream.mark_emitted()
    with sink.call(name):
        sink.arguments("{")
        try:
            yield from _read_parameters(stream, sink, sink.schema_of(name))
        finally:
            sink.arguments("}")
        yield from take_any(stream, (_INVOKE_END,))
        stream.mark_emitted()
    yield from stream.skip()


def _read_parameters(stream: TextStream, sink: EventSink, root: Mapping[str, Any] | None) -> Parse[None]:
    before = ""
    yield from stream.skip()
    stream.mark_emitted()
    while (yield from stream.take(_PARAMETER)):
        key = yield from stream.until('"')
        schema = yield from _read_attribute(stream, parameter_schema(root, key))
        yield from read_closed_value(stream, sink, f'{before}"{escape_json(key)}": ', schema, _PARAMETER_END, (_PARAMETER, _INVOKE_END))
        before = ", "
        yield from stream.skip()


def _read_attribute(stream: TextStream, schema: Mapping[str, Any] | None) -> Parse[Mapping[str, Any] | None]:
    """Parse the rest of a parameter's tag and return the schema of its value. A value marked as text is text if the schema allows it."""
    yield from stream.skip()
    if (yield from stream.take(_IS_TEXT)):
        schema = schema if schema is not None and schema.get("type") in _NOT_TEXT else {"type": "string"}
    elif (yield from stream.take(_IS_JSON)):
        schema = {} if schema is None else schema
    yield from stream.skip()
    yield from stream.expect(">")
    return schema


MARKERS = Markers(anywhere={f"<{DSML}{block}>": read_calls for block in BLOCKS})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool, block: str) -> str:
    """Build the grammar. Parameters come in the schema's order."""
    calls = [
        f"{grammar.text(f'{_INVOKE}{tool.name}{chr(34)}>{chr(10)}')} {_parameters(grammar, tool)} {grammar.text(_INVOKE_END + chr(10))}"
        for tool in tools
    ]
    body = grammar.listed(calls, "", several=several)
    return f"{grammar.text(f'<{DSML}{block}>{chr(10)}')} {body} {grammar.text(f'</{DSML}{block}>')}"


def _parameters(grammar: ToolCallGrammar, tool: Tool) -> str:
    root = arguments_schema(tool)
    required, parts = root.get("required") or (), []
    for name in root.get("properties") or ():
        schema = parameter_schema(root, name) or {}
        opening = grammar.text(f'{_PARAMETER}{name}" {_IS_TEXT if is_text(schema) else _IS_JSON}>')
        one = grammar.rule(f"{opening} {value_grammar(grammar, root, schema, _PARAMETER_END + chr(10))}")
        parts.append(one if name in required else f"{one}?")
    return " ".join(parts)


FORMAT_V32 = ToolCallFormat(MARKERS, (DSML,), (DSML,), partial(calls_grammar, block=BLOCKS[0]))
FORMAT_V4 = ToolCallFormat(MARKERS, (DSML, "tool_calls>"), (DSML,), partial(calls_grammar, block=BLOCKS[1]))
