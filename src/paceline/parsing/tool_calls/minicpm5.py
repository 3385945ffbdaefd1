"""<function name="f"><param name="a">x</param></function>, with CDATA where a value needs it: MiniCPM5."""

from collections.abc import Sequence

from paceline.parsing.attribute_xml import AttributeXml, attribute_xml_grammar
from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

TAGS = AttributeXml("<function", "<param", "</function>", "</param>", is_xml=True)
SIGNS = ('<function name="', '<param name="')
_ATTRIBUTE = "name="


def read_joined(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Read a call whose tag has no space, which some models leave out."""
    stream.at -= len(_ATTRIBUTE)
    yield from TAGS.read(stream, sink)


MARKERS = Markers(anywhere={f"{TAGS.function} ": TAGS.read, f"{TAGS.function}{_ATTRIBUTE}": read_joined})


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    return grammar.listed([attribute_xml_grammar(grammar, TAGS, tool) for tool in tools], "\n", several=several)


FORMAT = ToolCallFormat(MARKERS, SIGNS, (), calls_grammar)
