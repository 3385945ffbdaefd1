"""<|tool_call|>[{"name": …, "arguments": {…}}, …]: Granite 3.0 to 3.3, which may spell the token <tool_call>."""

from paceline.parsing.json_call_list import JsonCallList

OPEN = "<|tool_call|>"
CALLS = JsonCallList(open_marks=(OPEN, "<tool_call>"), close_marks=("</tool_call>",), before="[", after="]")
