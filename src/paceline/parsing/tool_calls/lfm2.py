"""<|tool_call_start|>[f(a='x', n=3), g()]<|tool_call_end|>, or a JSON list between the tokens: LFM2 and LFM2.5."""

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ToolCallFormat, call_list
from paceline.parsing.json_call import read_json_calls
from paceline.parsing.python_calls import CallListReader
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import python_call_grammar
from paceline.parsing.tool_calls.pythonic import read_list

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
SIGNS = (f"{OPEN} | List of tools: ",)  # some of its templates show no call
_READER = CallListReader((CLOSE,), ends_strings=True)


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    is_bracketed = yield from stream.take("[")
    yield from stream.skip()
    if (yield from stream.peek()) == "{":
        yield from read_json_calls(stream, sink)
        if not (yield from stream.take_or_end(CLOSE)):
            raise MalformedError
    else:
        yield from _READER.read(stream, sink, is_bracketed=is_bracketed)


calls_grammar = call_list(python_call_grammar, ", ", f"{OPEN}[", f"]{CLOSE}")
# the model sometimes leaves out the token before "["
FORMAT = ToolCallFormat({OPEN: read_calls}, SIGNS, (OPEN, CLOSE), calls_grammar, OPEN, first={"[": read_list})
