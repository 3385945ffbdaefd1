"""<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}, …]<|END_ACTION|>: Command R7B and Command A.

Command R and R+ write the objects without an id, in a code block after "Action:".
"""

from collections.abc import Sequence

from paceline.parsing.json_call_list import JsonCallList
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
_BETWEEN = ",\n"
CALLS = JsonCallList(open_marks=(OPEN,), close_marks=(CLOSE,), head='", "tool_name": NAME, "parameters": ')
COMMAND_R = JsonCallList(
    open_marks=("Action:",),
    only_known=True,
    before="\n```json\n[\n    ",
    between=",\n    ",
    after="\n]\n```",
    head='{\n        "tool_name": NAME,\n        "parameters": ',
    tail="\n    }",
)


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Build the grammar of a list whose objects begin with an id, which counts the calls of the conversation."""
    before, after = grammar.text(f"{OPEN}[\n"), grammar.text(f"\n]{CLOSE}")
    id_head = grammar.text('    {"tool_call_id": "')
    calls = [f"{id_head} /[0-9]{{1,3}}/ {grammar.call(CALLS.head_of(tool), tool, '}')}" for tool in tools]
    return f"{before} {grammar.listed(calls, _BETWEEN, several=several)} {after}"
