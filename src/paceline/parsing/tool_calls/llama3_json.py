"""{"name": …, "parameters": {…}}, alone or after <|python_tag|>, separated by semicolons: Llama 3.1 to 3.3."""

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ToolCallFormat, call_list, including_mark
from paceline.parsing.json_call import json_call_head, read_json_calls
from paceline.parsing.text_stream import Parse, TextStream

PYTHON_TAG = "<|python_tag|>"


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse one call or several, of tools that the model was shown only, because an answer may be any JSON."""
    yield from read_json_calls(stream, sink, only_known=True)


read_bare_calls = including_mark(read_calls, 1)
BARE = dict.fromkeys("{[`", read_bare_calls)
calls_grammar = call_list(lambda grammar, tool: grammar.call(json_call_head(tool.name, "parameters"), tool, "}"), "; ")
FORMAT = ToolCallFormat({PYTHON_TAG: read_calls}, ("<|start_header_id|>", '"parameters"'), (PYTHON_TAG,), calls_grammar, first=BARE)
