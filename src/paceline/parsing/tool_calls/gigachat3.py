"""<|function_call|>{"name": …, "arguments": {…}}, as the end of an answer or a separate message: GigaChat 3 and 3.1."""

from dataclasses import replace

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.json_call import JsonCallList
from paceline.parsing.text_stream import Parse, TextStream

OPEN, MESSAGE_END, ROLE_END = "<|function_call|>", "<|message_sep|>", "<|role_sep|>"
TOKENS = (OPEN, MESSAGE_END, ROLE_END)
_HEADER = f"\n\nfunction call{ROLE_END}\n"
CALLS = JsonCallList(open_marks=(OPEN,), between="")
MESSAGE_CALLS = replace(CALLS, open_marks=(MESSAGE_END + _HEADER,))


def read_message(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse a message with a call after the end of the one before; without such a message the end is dropped."""
    if (yield from stream.take(_HEADER)):
        yield from CALLS.read_calls(stream, sink)


MARKERS = {**CALLS.parsers, MESSAGE_END: read_message}
FORMAT = ToolCallFormat(MARKERS, (OPEN, ROLE_END), TOKENS, CALLS.calls_grammar, OPEN)
MESSAGE_FORMAT = ToolCallFormat(MARKERS, (ROLE_END, "'function call'"), TOKENS, MESSAGE_CALLS.calls_grammar)
