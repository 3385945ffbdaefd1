"""<function_calls>, a line f(a="x") for each call, </function_calls>: OLMo 3."""

from paceline.parsing.formats import ToolCallFormat, call_list
from paceline.parsing.python_calls import CallListReader
from paceline.parsing.tool_call_grammar import python_call_grammar

OPEN, CLOSE = "<function_calls>", "</function_calls>"
calls_grammar = call_list(python_call_grammar, "\n", f"{OPEN}\n", f"\n{CLOSE}")
FORMAT = ToolCallFormat({OPEN: CallListReader((CLOSE,)).read}, (OPEN, "!<invoke"), (), calls_grammar)
