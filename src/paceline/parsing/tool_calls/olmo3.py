"""<function_calls>, a line f(a="x") for each call, </function_calls>: OLMo 3."""

from paceline.parsing.formats import ToolCallFormat, call_list
from paceline.parsing.markers import Markers
from paceline.parsing.python_calls import CallListReader
from paceline.parsing.schema_grammar import python_call_grammar

OPEN, CLOSE = "<function_calls>", "</function_calls>"
MARKERS = Markers(anywhere={OPEN: CallListReader((CLOSE,)).read})
calls_grammar = call_list(python_call_grammar, "\n", f"{OPEN}\n", f"\n{CLOSE}")
FORMAT = ToolCallFormat(MARKERS, (OPEN, "!<invoke"), (), calls_grammar)
