"""[{"name": …, "arguments": {…}}, …] as the whole answer or in a code block: xLAM 2."""

from paceline.parsing.formats import ToolCallFormat, including_mark
from paceline.parsing.json_call import JsonCallList

CALLS = JsonCallList(open_marks=("[",), only_known=True, before="[", after="]")
TAGGED = JsonCallList(open_marks=("<tool_call>", "[TOOL_CALLS]"), close_marks=("</tool_call>",))
FORMAT = ToolCallFormat(
    {**TAGGED.parsers, "```": including_mark(CALLS.read_calls, len("```"))},
    ("make calls in a single JSON array",),
    (),
    CALLS.calls_grammar,
    first=dict.fromkeys("[{", including_mark(CALLS.read_calls, 1)),
)
