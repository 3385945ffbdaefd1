"""<minimax:tool_call><invoke name="…"><parameter name="key">value</parameter>…</invoke></minimax:tool_call>: MiniMax-M2."""

from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.tagged_calls import TaggedCallFormat

TAGS = TaggedCallFormat(
    open="<minimax:tool_call>",
    close="</minimax:tool_call>",
    function='<invoke name="',
    function_end="</invoke>",
    parameter='<parameter name="',
    parameter_end="</parameter>",
    quote='"',
    is_block=True,
)
FORMAT = ToolCallFormat({TAGS.open: TAGS.read_calls}, (TAGS.open, TAGS.function), (TAGS.open, TAGS.close), TAGS.calls_grammar, TAGS.open)
