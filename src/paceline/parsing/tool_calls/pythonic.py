"""[f(a='x'), g(b=1)], all of the answer: Llama 3.2 and 4, and models prompted likewise."""

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ToolCallFormat, call_list
from paceline.parsing.python_calls import CallListReader
from paceline.parsing.text_stream import Parse, TextStream
from paceline.parsing.tool_call_grammar import python_call_grammar
from paceline.parsing.tool_calls.llama3_json import PYTHON_TAG, read_bare_calls
from paceline.parsing.tool_calls.llama3_json import read_calls as read_json_calls

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
SIGNS = ("[func_name1(", "!<|header_start|>")
LLAMA4_SIGNS = ("<|header_start|>",)
LLAMA4_TOKENS = (PYTHON_START, PYTHON_END)
_BARE = CallListReader(only_known=True)
_MARKED = CallListReader(LLAMA4_TOKENS[1:], ends_strings=True, only_known=True)


def read_list(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Read the calls of a list, whose bracket is passed. Only known tools are called, because an answer may be any list."""
    yield from stream.skip()
    if (yield from stream.peek()) == "{":
        yield from read_json_calls(stream, sink)
        yield from stream.take("]")
    else:
        yield from _BARE.read(stream, sink, is_bracketed=True)


def read_marked(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    if (yield from stream.peek()) == "{":
        yield from read_json_calls(stream, sink)
        yield from stream.skip()
        yield from stream.take_or_end(PYTHON_END)
    else:
        yield from _MARKED.read(stream, sink)


_FIRST = {"[": read_list, "{": read_bare_calls}
calls_grammar = call_list(python_call_grammar, ", ", "[", "]")
LLAMA4_FORMAT = ToolCallFormat({PYTHON_START: read_marked}, LLAMA4_SIGNS, LLAMA4_TOKENS, calls_grammar, first=_FIRST)
FORMAT = ToolCallFormat({PYTHON_TAG: read_marked}, SIGNS, (PYTHON_TAG,), calls_grammar, first=_FIRST)
