"""<function=name>{…}</function>, or >>>name, line end, {…} in version 3.2: Functionary 3.1 and 3.2, custom tools of Llama 3.1."""

import string
from collections.abc import Sequence
from functools import partial

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ReasoningFormat, ToolCallFormat, call_list, including_mark
from paceline.parsing.json_call import emit_object_call
from paceline.parsing.reasoning import drop_mark
from paceline.parsing.text_stream import NAME_CHARACTER, MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

FUNCTION, FUNCTION_END = "<function=", "</function>"
RECIPIENT, TEXT = ">>>", "all"


def read_function(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse a call of version 3.1."""
    name = (yield from stream.until(">")).strip()
    yield from _read_arguments(stream, sink, name)
    yield from stream.skip()
    yield from stream.take_or_end(FUNCTION_END)


def read_recipient(stream: TextStream, sink: EventSink, *, is_first: bool = False) -> Parse[None]:
    """Parse a call of version 3.2, or drop the heading of text.

    Args:
        is_first: whether the answer begins with it, because the prompt already has the mark. Its name must be an offered tool's then.
    """
    name = yield from stream.matching(NAME_CHARACTER)
    if (is_first and name != TEXT and not sink.has_tool(name)) or not (yield from stream.take("\n")):
        raise MalformedError
    if name != TEXT:
        yield from _read_arguments(stream, sink, name)


def _read_arguments(stream: TextStream, sink: EventSink, name: str) -> Parse[None]:
    yield from stream.skip()
    if not name.isprintable():
        raise MalformedError
    yield from emit_object_call(stream, sink, name)


calls_grammar_v31 = call_list(lambda grammar, tool: grammar.call(f"{FUNCTION}{tool.name}>", tool, FUNCTION_END))


def calls_grammar_v32(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Build the grammar. The first mark is optional, because the prompt may end with it."""
    calls = [grammar.call(f"{tool.name}\n", tool) for tool in tools]
    body = grammar.listed(calls, RECIPIENT, several=several)
    return f"{grammar.literal(RECIPIENT)}? {body}"


FORMAT_V31 = ToolCallFormat({FUNCTION: read_function}, (FUNCTION, "!<parameter=", "!<seed:"), (), calls_grammar_v31)
# the prompt ends with the mark of the first recipient, also without tools
ANSWER_FORMAT = ReasoningFormat({f"{RECIPIENT}{TEXT}\n": drop_mark}, (">>>all",), (), first={f"{TEXT}\n": drop_mark})
FORMAT_V32 = ToolCallFormat(
    {RECIPIENT: read_recipient},
    (">>>all",),
    (),
    calls_grammar_v32,
    first=dict.fromkeys(string.ascii_letters + string.digits + "_", including_mark(partial(read_recipient, is_first=True), 1)),
)
