"""Calls between marks as DeepSeek's, each a <steptml:invoke> element: Step 3."""

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ToolCallFormat, call_list
from paceline.parsing.tagged_calls import TaggedCallFormat
from paceline.parsing.text_stream import Parse, TextStream

OPEN, CLOSE = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"
TOKENS = (OPEN, CLOSE, CALL, SEPARATOR, CALL_END)
TAGS = TaggedCallFormat(
    close=CLOSE,
    function="<steptml:invoke",
    function_end="</steptml:invoke>",
    parameter="<steptml:parameter",
    parameter_end="</steptml:parameter>",
    attribute="name=",
    quote='"',
)
_HEAD = f"{CALL}function{SEPARATOR}"


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse all calls. The marks of a call may be missing."""
    yield from _read_call(stream, sink)
    while sink.can_call and (yield from stream.one_of((CALL, TAGS.function))) is not None:
        yield from _read_call(stream, sink)
    yield from stream.take_or_end(CLOSE)


def _read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    yield from stream.take(_HEAD)
    yield from stream.skip()
    yield from stream.expect(TAGS.function)
    yield from TAGS.read_function(stream, sink)
    yield from stream.skip()
    yield from stream.take_or_end(CALL_END)
    yield from stream.skip()
    stream.mark_emitted()


calls_grammar = call_list(
    lambda grammar, tool: f"{grammar.literal(_HEAD)} {TAGS.call_grammar(grammar, tool, '')} {grammar.literal(CALL_END + chr(10))}",
    before=f"{OPEN}\n",
    after=CLOSE,
)
FORMAT = ToolCallFormat({OPEN: read_calls}, (TAGS.function,), TOKENS, calls_grammar, OPEN)
