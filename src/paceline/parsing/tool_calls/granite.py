"""<|tool_call|>[{"name": …, "arguments": {…}}, …], or the same after <tool_call>: Granite 3.0 to 3.3."""

from paceline.parsing.json_call_list import JsonCallList

OPEN = "<|tool_call|>"
CALLS = JsonCallList(open_marks=(OPEN, "<tool_call>"), close_marks=("</tool_call>",), before="[", after="]")
