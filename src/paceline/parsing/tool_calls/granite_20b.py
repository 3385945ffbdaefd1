"""<function_call> {"name": …, "arguments": {…}}, the mark before each call: Granite-20B function calling."""

from paceline.parsing.json_call import JsonCallList

OPEN = "<function_call>"
CALLS = JsonCallList(open_marks=(OPEN,), head=' {"name": NAME, "arguments": ', between="")
FORMAT = CALLS.format_of((OPEN,), (OPEN,))
