"""<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>: Hunyuan-A13B, and Jamba with line ends within."""

from dataclasses import replace

from paceline.parsing.event_sink import EventSink
from paceline.parsing.json_call_list import JsonCallList
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import Parse, TextStream

OPEN, CLOSE = "<tool_calls>", "</tool_calls>"
TOKENS = (OPEN, CLOSE)
ROLE = "助手："  # the chat template makes text answers begin with "assistant:"

CALLS = JsonCallList(open_marks=(OPEN,), close_marks=(CLOSE,), before="[", after="]" + CLOSE)
JAMBA_CALLS = replace(CALLS, before="[\n    ", between=",\n    ", after="\n]" + CLOSE)


def drop_role(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Leave the role out of the text."""
    yield from ()


MARKERS = Markers(anywhere=CALLS.markers.anywhere, first={ROLE: drop_role})
