"""[{"name": …, "arguments": {…}}, …] as the whole answer or in a code block: xLAM 2."""

from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.json_call_list import JsonCallList
from paceline.parsing.output_parser import Markers

CALLS = JsonCallList(open_marks=("[",), only_known=True, before="[", after="]")
TAGGED = JsonCallList(open_marks=("<tool_call>", "[TOOL_CALLS]"), close_marks=("</tool_call>",))
MARKERS = Markers(
    anywhere={**TAGGED.markers.anywhere, "```": CALLS.reader(len("```"))}, first=dict.fromkeys(("[", "{"), CALLS.reader(len("[")))
)
FORMAT = ToolCallFormat(MARKERS, ("make calls in a single JSON array",), (), CALLS.calls_grammar)
