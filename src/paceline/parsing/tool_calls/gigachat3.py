"""<|function_call|>{"name": …, "arguments": {…}} at the end of an answer: GigaChat 3.1; GigaChat 3 writes it as a message of its own."""

from dataclasses import replace

from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.json_call_list import JsonCallList

OPEN, MESSAGE, ROLE = "<|function_call|>", "<|message_sep|>", "<|role_sep|>"
TOKENS = (OPEN, MESSAGE, ROLE)
CALLS = JsonCallList(open_marks=(OPEN, f"{MESSAGE}\n\nfunction call{ROLE}\n"), close_marks=(MESSAGE,), between="")
MESSAGE_CALLS = replace(CALLS, open_marks=CALLS.open_marks[::-1])

FORMAT = CALLS.format_of((OPEN, ROLE), TOKENS)
MESSAGE_FORMAT = ToolCallFormat(MESSAGE_CALLS.markers, (ROLE, "'function call'"), TOKENS, MESSAGE_CALLS.calls_grammar)
