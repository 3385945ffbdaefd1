"""<function_calls>, a line f(a="x") for each call, </function_calls>: OLMo 3."""

from collections.abc import Sequence

from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.output_parser import Markers
from paceline.parsing.python_calls import CallListReader
from paceline.parsing.schema_grammar import python_call_grammar
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<function_calls>", "</function_calls>"
MARKERS = Markers(anywhere={OPEN: CallListReader((CLOSE,)).read})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    calls = [python_call_grammar(grammar, tool) for tool in tools]
    newline = "\n"
    return f"{grammar.literal(OPEN + newline)} {grammar.listed(calls, newline, several=several)} {grammar.literal(newline + CLOSE)}"


FORMAT = ToolCallFormat(MARKERS, (OPEN, "!<invoke"), (), calls_grammar)
