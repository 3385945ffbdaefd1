"""[{"name": …, "arguments": {…}}, …] as the whole answer or in a code block: xLAM 2."""

from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.json_call_list import JsonCallList
from paceline.parsing.markers import Markers, including_mark

CALLS = JsonCallList(open_marks=("[",), only_known=True, before="[", after="]")
TAGGED = JsonCallList(open_marks=("<tool_call>", "[TOOL_CALLS]"), close_marks=("</tool_call>",))
MARKERS = Markers(
    anywhere={**TAGGED.markers.anywhere, "```": including_mark(CALLS.read_calls, len("```"))},
    first=dict.fromkeys("[{", including_mark(CALLS.read_calls, 1)),
)
FORMAT = ToolCallFormat(MARKERS, ("make calls in a single JSON array",), (), CALLS.calls_grammar)
