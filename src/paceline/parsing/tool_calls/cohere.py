"""<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}, …]<|END_ACTION|>: Command R7B and Command A.

Command R and R+ write the objects without an id, in a code block after "Action:".
"""

from paceline.parsing.formats import ReasoningFormat, ToolCallFormat, call_list
from paceline.parsing.json_call import JsonCallList
from paceline.parsing.reasoning import ReasoningReader, drop_mark

THINK = ("<|START_THINKING|>", "<|END_THINKING|>")
ANSWER = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
_ID_HEAD = '    {"tool_call_id": "'
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
read_reasoning = ReasoningReader(THINK[1])
# the id counts the calls of the conversation
calls_grammar = call_list(
    lambda grammar, tool: f"{grammar.literal(_ID_HEAD)} /[0-9]{{1,3}}/ {grammar.call(CALLS.head_of(tool), tool, '}')}",
    ",\n",
    f"{OPEN}[\n",
    f"\n]{CLOSE}",
)
FORMAT = ToolCallFormat(CALLS.parsers, (OPEN,), (OPEN, CLOSE), calls_grammar, OPEN)
COMMAND_R_FORMAT = ToolCallFormat(COMMAND_R.parsers, ("json-formatted list of actions",), (), COMMAND_R.calls_grammar)
REASONING_FORMAT = ReasoningFormat(
    {THINK[0]: read_reasoning, **dict.fromkeys(ANSWER, drop_mark)}, THINK[:1], (*THINK, *ANSWER), *THINK, read_reasoning
)
