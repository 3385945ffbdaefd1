"""{"tool_call": {"name": …, "arguments": {…}}}: templates without a known format.

The prompt explains the tools and the form in the system message, with the text of `generic_tool_prompt`.
"""

import json
from collections.abc import Sequence
from functools import partial

from paceline.parsing.formats import ToolCallFormat, call_list, including_mark
from paceline.parsing.json_call import json_call_head, read_json_calls
from paceline.parsing.tools import Tool

_HEAD = '{"tool_call"'
_FENCES = ("```json\n", "```\n")
GENERIC_TOOL_PROMPT = """You can call these functions. Each line is one function, with a JSON schema of its parameters:

{tools}

To call a function, answer with a JSON object of this form and nothing else:
{{"tool_call": {{"name": "the function's name", "arguments": {{"a parameter": "its value"}}}}}}
To call several functions, write one such object on each line. You will then get the results. \
If no function is needed, answer the user in plain text."""


def generic_tool_prompt(tools: Sequence[Tool]) -> str:
    """Return the text for the system message that describes tools and how they are called."""
    lines = [json.dumps(tool.as_template()["function"], ensure_ascii=False) for tool in tools]
    return GENERIC_TOOL_PROMPT.format(tools="\n".join(lines))


_read_calls = partial(read_json_calls, only_known=True)
calls_grammar = call_list(lambda grammar, tool: grammar.call(f"{_HEAD}: {json_call_head(tool.name)}", tool, "}}"), "\n")
FORMAT = ToolCallFormat(
    {mark: including_mark(_read_calls, len(mark)) for mark in (_HEAD, *(fence + _HEAD for fence in _FENCES))},
    (),
    (),
    calls_grammar,
    first=dict.fromkeys("{[`", including_mark(_read_calls, 1)),
)
