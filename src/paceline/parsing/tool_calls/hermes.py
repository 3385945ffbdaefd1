"""<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen 2.5, Qwen 3 and Granite 4."""

from paceline.parsing.formats import ToolCallFormat, call_list
from paceline.parsing.json_call import json_call_head
from paceline.parsing.tool_calls import qwen3_coder

OPEN, CLOSE = "<tool_call>", "</tool_call>"
calls_grammar = call_list(lambda grammar, tool: grammar.call(f"{OPEN}\n{json_call_head(tool.name)}", tool, "}\n" + CLOSE), "\n")
_OTHER_SIGNS = ("!<arg_key>", "!<invoke", "!<tool_calls>")  # signs of other formats that also use <tool_call>
# Qwen 3 at times writes calls as Qwen3-Coder does
FORMAT = ToolCallFormat({OPEN: qwen3_coder.read_calls}, (OPEN, *_OTHER_SIGNS), (OPEN, CLOSE), calls_grammar, OPEN)
