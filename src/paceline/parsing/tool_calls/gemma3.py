"""Python fenced as tool_code, JSON fenced as json, or a bare list: Gemma 3."""

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ToolCallFormat, call_list
from paceline.parsing.python_calls import CallListReader
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import python_call_grammar
from paceline.parsing.tool_calls.llama3_json import read_bare_calls, read_calls
from paceline.parsing.tool_calls.pythonic import read_list

FENCE = "```"
TOOL_CODE, PYTHON, JSON = f"{FENCE}tool_code", f"{FENCE}python", f"{FENCE}json"
_READER = CallListReader((FENCE,), only_known=True, is_code=True)


def read_json_fence(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from read_calls(stream, sink)
    if not (yield from stream.take_or_end(FENCE)):
        raise MalformedError


calls_grammar = call_list(python_call_grammar, "\n", f"{TOOL_CODE}\n", f"\n{FENCE}")
FORMAT = ToolCallFormat(
    {TOOL_CODE: _READER.read, PYTHON: _READER.read, JSON: read_json_fence},
    (TOOL_CODE,),
    (),
    calls_grammar,
    first={"[": read_list, "{": read_bare_calls},
)
