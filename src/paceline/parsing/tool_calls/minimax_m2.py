"""<minimax:tool_call><invoke name="…"><parameter name="key">value</parameter>…</invoke></minimax:tool_call>: MiniMax-M2."""

from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.tagged_calls import TaggedCallFormat

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
TAGS = TaggedCallFormat(
    open=OPEN,
    close=CLOSE,
    function='<invoke name="',
    function_end="</invoke>",
    parameter='<parameter name="',
    parameter_end="</parameter>",
    quote='"',
    is_block=True,
)
FORMAT = ToolCallFormat({OPEN: TAGS.read_calls}, (OPEN, TAGS.function), (OPEN, CLOSE), TAGS.calls_grammar, OPEN)
