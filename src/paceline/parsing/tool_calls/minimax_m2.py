"""<minimax:tool_call><invoke name="…"><parameter name="key">value</parameter>…</invoke></minimax:tool_call>: MiniMax-M2."""

from collections.abc import Sequence

from paceline.parsing.end_mark import skip_repeated_mark
from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tool_calls.qwen3_coder import Tags, parameters_grammar, read_functions
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
TAGS = Tags('<invoke name="', '<parameter name="', '">', "", "</parameter>", "</invoke>", CLOSE, OPEN)


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse what follows one or more opening marks."""
    yield from skip_repeated_mark(stream, OPEN)
    if sink.num_calls and (yield from stream.peek()) == "":  # an opening mark where a closing one should be
        return
    yield from stream.expect(TAGS.function)
    yield from read_functions(stream, sink, TAGS)


MARKERS = Markers(anywhere={OPEN: read_calls})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Return a grammar of calls as `qwen3_coder.calls_grammar`, with all calls between one pair of marks."""
    heads = [grammar.text(f"{TAGS.function}{tool.name}{TAGS.name_end}\n") for tool in tools]
    end = grammar.text(f"{TAGS.function_end}\n")
    calls = [f"{head} {parameters_grammar(grammar, tool, TAGS)} {end}" for head, tool in zip(heads, tools, strict=True)]
    return f"{grammar.text(f'{OPEN}{chr(10)}')} {grammar.listed(calls, '', several=several)} {grammar.text(CLOSE)}"


FORMAT = ToolCallFormat(MARKERS, (OPEN, TAGS.function), (OPEN, CLOSE), calls_grammar, OPEN)
