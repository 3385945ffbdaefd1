"""{"tool_call": {"name": …, "arguments": {…}}}: templates without a known format.

The prompt explains the tools and the form in the system message, with the text of `generic_tool_prompt`.
"""

import json
from collections.abc import Sequence

from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.json_call import json_call_head, read_json_calls
from paceline.parsing.output_parser import Markers, ParseMarkup
from paceline.parsing.text_stream import Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
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


def _parser_after(mark: str) -> ParseMarkup:
    """Return a parser of calls that begin with the mark."""

    def read(stream: TextStream, sink: EventSink) -> Parse[None]:
        stream.at -= len(mark)
        yield from read_json_calls(stream, sink, only_known=True)

    return read


MARKERS = Markers(
    anywhere={mark: _parser_after(mark) for mark in (_HEAD, *(fence + _HEAD for fence in _FENCES))},
    first={mark: _parser_after(mark) for mark in "{[`"},
)


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    calls = [grammar.call(f"{_HEAD}: {json_call_head(tool.name)}", tool, "}}") for tool in tools]
    return grammar.listed(calls, "\n", several=several)


FORMAT = ToolCallFormat(MARKERS, (), (), calls_grammar)
