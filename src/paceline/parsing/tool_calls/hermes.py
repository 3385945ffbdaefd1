"""<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen 2.5, Qwen 3 and Granite 4."""

from collections.abc import Sequence

from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.json_call import json_call_head
from paceline.parsing.output_parser import Markers
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tool_calls import qwen3_coder
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKERS = Markers(anywhere={OPEN: qwen3_coder.read_calls})  # Qwen 3 at times writes calls as Qwen3-Coder does


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    calls = [grammar.call(f"{OPEN}\n{json_call_head(tool.name)}", tool, "}\n" + CLOSE) for tool in tools]
    return grammar.listed(calls, "\n", several=several)


_OTHER_SIGNS = ("!<arg_key>", "!<invoke", "!<tool_calls>")  # of formats that write other things after <tool_call>
FORMAT = ToolCallFormat(MARKERS, (OPEN, *_OTHER_SIGNS), (OPEN, CLOSE), calls_grammar, OPEN)
