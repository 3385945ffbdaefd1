"""Messages with a recipient, whose calls are <atem:invoke> elements: Muse Glimmer.

Reasoning is to `self`, the answer is to `user`, calls are to the tool.
"""

from collections.abc import Sequence

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ReasoningFormat, ToolCallFormat
from paceline.parsing.reasoning import drop_mark
from paceline.parsing.tagged_calls import TaggedCallFormat
from paceline.parsing.text_stream import WHITESPACE, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<atem:function_calls>", "</atem:function_calls>"
START, MESSAGE, ENDS = "<|start|>", "<|message|>", ("<|eom|>", "<|eot|>")
TOKENS = (START, MESSAGE, *ENDS)
TAGS = TaggedCallFormat(
    open=OPEN,
    close=CLOSE,
    function="<atem:invoke",
    function_end="</atem:invoke>",
    parameter="<atem:parameter",
    parameter_end="</atem:parameter>",
    attribute="name=",
    quote='"',
)
_TO, _SELF, _USER = "to=", "self", "user"
THINK_OPEN = f" {_TO}{_SELF}{MESSAGE}"


def read_reasoning(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Read a message to `self`, up to its end or the next message."""
    stream.mark_emitted()
    end = yield from stream.emit_until((*ENDS, START), sink.reasoning, held="\n")
    if end is not None and end != START:
        stream.at += len(end)


def read_header(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Read the header of a message, and the message if it is reasoning or for the user."""
    recipient = (yield from stream.until(MESSAGE)).rpartition(_TO)[2].strip()
    if recipient == _SELF:
        yield from read_reasoning(stream, sink)
    elif recipient == _USER:  # calls that it quotes are text
        stream.mark_emitted()
        yield from stream.emit_until((*ENDS, START), sink.text, held=WHITESPACE)


_HEADERS = {START: read_header, **dict.fromkeys((*ENDS, MESSAGE), drop_mark)}


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Return a grammar of one call, which ends the answer."""
    calls = []
    for tool in tools:
        head = grammar.literal(f" to={tool.name}{MESSAGE}{OPEN}\n")
        calls.append(f"{head} {TAGS.call_grammar(grammar, tool)} {grammar.literal(chr(10) + CLOSE)}")
    return f"({grammar.literal(START + 'assistant')})? {grammar.one_of(calls)}"


# the first header begins in the prompt
FORMAT = ToolCallFormat({OPEN: TAGS.read_calls, **_HEADERS}, (OPEN,), TOKENS, calls_grammar, first={"to=": read_header})
REASONING_FORMAT = ReasoningFormat(
    _HEADERS, (_TO + _SELF, MESSAGE), TOKENS, THINK_OPEN, ENDS[0], read_reasoning, first={"to=": read_header}
)
