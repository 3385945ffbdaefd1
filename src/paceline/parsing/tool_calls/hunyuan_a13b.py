"""<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>: Hunyuan-A13B, MiniMax-M1, Jamba and Apriel.

Jamba writes line ends within the list, MiniMax-M1 the calls on lines of their own without a list.
"""

from dataclasses import replace

from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.json_call import JsonCallList
from paceline.parsing.reasoning import drop_mark, think_before

ANSWER = ("<answer>", "</answer>")
OPEN, CLOSE = "<tool_calls>", "</tool_calls>"
TOKENS = (OPEN, CLOSE)
ROLE = "助手："  # the chat template makes text answers begin with "assistant:"

CALLS = JsonCallList(open_marks=(OPEN,), close_marks=(CLOSE,), before="[", after="]" + CLOSE)
MINIMAX_M1_CALLS = replace(CALLS, before="\n", between="\n", after="\n" + CLOSE)
JAMBA_CALLS = replace(CALLS, before="[\n    ", between=",\n    ", after="\n]" + CLOSE)


MINIMAX_M1_FORMAT = MINIMAX_M1_CALLS.format_of((OPEN, "<beginning_of_sentence>"), TOKENS)
JAMBA_FORMAT = JAMBA_CALLS.format_of((OPEN, "<|bom|>"), TOKENS)
FORMAT = ToolCallFormat(CALLS.parsers, (OPEN,), TOKENS, CALLS.calls_grammar, OPEN, first={ROLE: drop_mark})
REASONING_FORMAT = think_before(ANSWER)
