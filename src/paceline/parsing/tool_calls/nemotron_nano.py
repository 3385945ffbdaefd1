"""<TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>: Nemotron Nano 2."""

from paceline.parsing.json_call import JsonCallList

OPEN, CLOSE = "<TOOLCALL>", "</TOOLCALL>"
CALLS = JsonCallList(open_marks=(OPEN,), close_marks=(CLOSE,), before="[", after="]" + CLOSE)
FORMAT = CALLS.format_of((OPEN,), (OPEN, CLOSE))
