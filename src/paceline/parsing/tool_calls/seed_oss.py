"""<seed:tool_call><function=f><parameter=a>x</parameter></function></seed:tool_call>: Seed-OSS.

Reasoning is between <seed:think> and </seed:think>. Remarks on the thinking budget are part of it.
"""

from collections.abc import Sequence

from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import ReasoningFormat, ToolCallFormat
from paceline.parsing.output_parser import Markers
from paceline.parsing.reasoning import reasoning_until
from paceline.parsing.text_stream import MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tool_calls.qwen3_coder import (
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    Tags,
    parameters_grammar,
    read_function,
)
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"
THINK = ("<seed:think>", "</seed:think>")
BUDGET = ("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>")
TAGS = Tags(FUNCTION, PARAMETER, ">", "", PARAMETER_END, FUNCTION_END)
read_reasoning = reasoning_until(THINK[1])
THINK_MARKERS = Markers(first={THINK[0]: read_reasoning})


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    yield from stream.expect(FUNCTION)
    yield from read_function(stream, sink, TAGS)
    yield from stream.skip()
    while sink.can_call and (yield from stream.take(FUNCTION)):
        yield from read_function(stream, sink, TAGS)
        yield from stream.skip()
    if not (yield from stream.take_or_end(CLOSE)):
        raise MalformedError


MARKERS = Markers(anywhere={OPEN: read_calls})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Return a grammar as that of `qwen3_coder`, with no line ends around values."""
    closing = grammar.text(f"{FUNCTION_END}\n{CLOSE}")
    heads = [grammar.text(f"{OPEN}\n{FUNCTION}{tool.name}>\n") for tool in tools]
    calls = [f"{head} {parameters_grammar(grammar, tool, TAGS)} {closing}" for head, tool in zip(heads, tools, strict=True)]
    return grammar.listed(calls, "\n", several=several)


FORMAT = ToolCallFormat(MARKERS, (OPEN,), (OPEN, CLOSE), calls_grammar, OPEN)
REASONING_FORMAT = ReasoningFormat(THINK_MARKERS, THINK[:1], (*THINK, *BUDGET), *THINK, read_reasoning)
