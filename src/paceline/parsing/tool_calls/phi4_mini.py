"""functools[{"name": …, "arguments": {…}}, …] or after <|tool_call|>: Phi-4-mini and Firefunction v2."""

from dataclasses import replace

from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.json_call import JsonCallList

OPEN, CLOSE = "<|tool_call|>", "<|/tool_call|>"
TOKENS = (OPEN, CLOSE)

TAGGED = JsonCallList(
    open_marks=(OPEN, "functools[", "<|tool_calls|>"), close_marks=(CLOSE, "<|/tool_calls|>"), before="[", after="]" + CLOSE
)
FUNCTOOLS = replace(TAGGED, open_marks=("functools[", OPEN, "<|tool_calls|>"), after="]")
TAGGED_FORMAT = TAGGED.format_of(("<|/tool|>",), TOKENS)
FUNCTOOLS_FORMAT = ToolCallFormat(FUNCTOOLS.parsers, ("functools[",), TOKENS, FUNCTOOLS.calls_grammar)
