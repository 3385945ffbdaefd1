"""<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen 2.5 and Qwen 3."""

from collections.abc import Sequence

from paceline.parsing.end_mark import pass_end_mark, skip_repeated_mark
from paceline.parsing.event_sink import EventSink
from paceline.parsing.json_call import json_call_head, read_json_calls
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tool_calls import qwen3_coder
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse what follows one or more opening marks: a call or several."""
    yield from skip_repeated_mark(stream, OPEN)
    if sink.num_calls and (yield from stream.peek()) == "":  # an opening mark where a closing one should be
        return
    if (yield from stream.take(qwen3_coder.FUNCTION)):  # Qwen 3 at times writes calls as Qwen3-Coder does
        yield from qwen3_coder.TAGS.read_functions(stream, sink)
        return
    yield from read_json_calls(stream, sink)
    yield from pass_end_mark(stream, CLOSE)


MARKERS = Markers(anywhere={OPEN: read_call})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    calls = [grammar.call(f"{OPEN}\n{json_call_head(tool.name)}", tool, "}\n" + CLOSE) for tool in tools]
    return grammar.listed(calls, "\n", several=several)
