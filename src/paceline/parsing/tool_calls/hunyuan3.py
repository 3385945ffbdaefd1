"""<tool_calls><tool_call>name<tool_sep><arg_key>…</arg_key><arg_value>…</arg_value></tool_call></tool_calls>: Hunyuan 3.

Hunyuan 4 leaves out <tool_sep> and the line ends.
"""

import re
from collections.abc import Sequence

from paceline.parsing.event_sink import EventSink
from paceline.parsing.json_call_list import take_any
from paceline.parsing.lenient_json import emit_json_object
from paceline.parsing.output_parser import Markers
from paceline.parsing.tagged_calls import LINE_END, TaggedCalls
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<tool_calls>", "</tool_calls>"
CALL, SEPARATOR, CALL_END = "<tool_call>", "<tool_sep>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
TOKENS = (OPEN, CLOSE, CALL, SEPARATOR, CALL_END, KEY, KEY_END, VALUE, VALUE_END)
_NAME = re.compile(r"[\w.\-]")
TAGS = TaggedCalls(
    open=OPEN, close=CLOSE, function=CALL, function_end=CALL_END, parameter=KEY, key_end=KEY_END, value=VALUE, parameter_end=VALUE_END
)


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    yield from stream.take(CALL)
    yield from _read_call(stream, sink)
    while sink.can_call and (yield from stream.take(CALL)):
        yield from _read_call(stream, sink)
    yield from stream.take_or_end(CLOSE)


def _read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    name = yield from stream.matching(_NAME)
    yield from stream.skip()
    has_separator = yield from stream.take(SEPARATOR)
    yield from stream.skip()
    if not name or not (has_separator or (sink.knows(name) and (yield from stream.one_of((KEY, CALL_END))))):
        raise MalformedError
    stream.mark_emitted()
    with sink.call(name):
        if (yield from stream.peek()) == "{":
            yield from emit_json_object(stream, sink.arguments)
        else:
            sink.arguments("{")
            yield from TAGS.read_parameters(stream, sink, sink.schema_of(name))
        stream.mark_emitted()
    yield from stream.skip()
    yield from take_any(stream, (CALL_END,))
    yield from stream.skip()
    stream.mark_emitted()


def read_bare_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse calls whose outer mark is missing."""
    stream.at -= len(CALL)
    yield from read_calls(stream, sink)


MARKERS = Markers(anywhere={OPEN: read_calls, CALL: read_bare_call})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Return a grammar of calls with arguments in the schema's order."""
    separator = "" if grammar.has(KEY) and not grammar.has(SEPARATOR) else SEPARATOR
    heads = [grammar.text(f"{CALL}{tool.name}{separator}") for tool in tools]
    end = f"{grammar.text(CALL_END)} {LINE_END}"
    calls = [f"{head} {TAGS.pairs_grammar(grammar, tool)} {end}" for head, tool in zip(heads, tools, strict=True)]
    return f"{grammar.text(OPEN)} {LINE_END} {grammar.listed(calls, '', several=several)} {grammar.text(CLOSE)}"
