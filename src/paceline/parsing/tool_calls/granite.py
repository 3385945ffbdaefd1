"""<|tool_call|>[{"name": …, "arguments": {…}}, …], or after <tool_call>: Granite 3.0 to 3.3."""

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ReasoningFormat
from paceline.parsing.json_call import JsonCallList
from paceline.parsing.text_stream import WHITESPACE, Parse, TextStream

THINK = ("Here is my thought process:", "Here is my response:")
_THINK_SHORT = ("Here's my thought process:", "Here's my response:")  # spelling of quantised models
OPEN = "<|tool_call|>"
CALLS = JsonCallList(open_marks=(OPEN, "<tool_call>"), close_marks=("</tool_call>",), before="[", after="]")


def read_reasoning(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse reasoning up to one of the phrases. White space around the reasoning is markup."""
    yield from stream.skip()
    stream.mark_emitted()
    close = yield from stream.emit_until((THINK[1], _THINK_SHORT[1]), sink.reasoning, held=WHITESPACE)
    stream.at += len(close or "")


FORMAT = CALLS.format_of((OPEN,), (OPEN,))
REASONING_FORMAT = ReasoningFormat(
    {}, THINK[:1], (), *THINK, read_reasoning, first=dict.fromkeys((THINK[0], _THINK_SHORT[0]), read_reasoning)
)
