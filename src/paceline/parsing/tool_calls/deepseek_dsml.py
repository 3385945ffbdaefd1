"""<｜DSML｜invoke name="…"><｜DSML｜parameter name="…" string="true">…</｜DSML｜parameter></｜DSML｜invoke>: DeepSeek V3.2 and V4.

V3.2 puts the calls into <｜DSML｜function_calls>, V4 into <｜DSML｜tool_calls>.
"""

from dataclasses import replace

from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.tagged_calls import TaggedCallFormat

DSML = "｜DSML｜"
_V32 = TaggedCallFormat(
    open=f"<{DSML}function_calls>",
    close=f"</{DSML}function_calls>",
    function=f'<{DSML}invoke name="',
    function_end=f"</{DSML}invoke>",
    parameter=f'<{DSML}parameter name="',
    parameter_end=f"</{DSML}parameter>",
    quote='"',
    is_block=True,
    has_types=True,
)
_V4 = replace(_V32, open=f"<{DSML}tool_calls>", close=f"</{DSML}tool_calls>")
MARKERS = {tags.open: tags.read_calls for tags in (_V32, _V4)}
FORMAT_V32 = ToolCallFormat(MARKERS, (DSML,), (DSML,), _V32.calls_grammar)
FORMAT_V4 = ToolCallFormat(MARKERS, (DSML, "tool_calls>"), (DSML,), _V4.calls_grammar)
