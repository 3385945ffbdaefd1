"""<function name="f"><param name="a">x</param></function>, with CDATA if needed: MiniCPM5."""

from collections.abc import Sequence

from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.output_parser import Markers
from paceline.parsing.tagged_calls import TaggedCallFormat
from paceline.parsing.text_stream import Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

TAGS = TaggedCallFormat(
    function="<function",
    function_end="</function>",
    parameter="<param",
    parameter_end="</param>",
    attribute="name=",
    quote='"',
    is_xml=True,
)
SIGNS = ('<function name="', '<param name="')


def read_joined(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Read a call whose tag has no space, which some models leave out."""
    stream.at -= len(TAGS.attribute)
    yield from TAGS.read_function(stream, sink)


MARKERS = Markers(anywhere={f"{TAGS.function} ": TAGS.read_function, f"{TAGS.function}{TAGS.attribute}": read_joined})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    return grammar.listed([TAGS.call_grammar(grammar, tool, "") for tool in tools], "\n", several=several)


FORMAT = ToolCallFormat(MARKERS, SIGNS, (), calls_grammar)
