"""<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>: Qwen3-Coder, Qwen 3.5 and Nemotron 3."""

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.json_call import read_json_calls
from paceline.parsing.tagged_calls import TaggedCallFormat
from paceline.parsing.text_stream import Parse, TextStream

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAGS = TaggedCallFormat(
    open=OPEN,
    close=CLOSE,
    function="<function=",
    function_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
    border="\n",
)


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse what follows one or more opening marks. A call may also be written as JSON."""
    yield from stream.skip_repeated(OPEN)
    char = yield from stream.peek()
    if char and char in "{[`":
        yield from read_json_calls(stream, sink)
        yield from stream.pass_end_mark(CLOSE)
    else:
        yield from TAGS.read_calls(stream, sink)


# these models at times leave out <tool_call>
_MARKS = {OPEN: read_calls, TAGS.function: TAGS.read_functions}
FORMAT = ToolCallFormat(_MARKS, (TAGS.function, TAGS.parameter, "!<seed:"), (OPEN, CLOSE), TAGS.calls_grammar, OPEN)
