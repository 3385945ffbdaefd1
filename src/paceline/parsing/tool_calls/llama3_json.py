"""{"name": …, "parameters": {…}}, all of the answer or behind <|python_tag|>: Llama 3.1 to 3.3; several are separated by semicolons."""

from collections.abc import Sequence

from paceline.parsing.event_sink import Writer
from paceline.parsing.json_call import envelope_head, read_envelope
from paceline.parsing.output_parser import Markers
from paceline.parsing.text_stream import SPACE, Reading, Source
from paceline.parsing.tool_call_grammar import CallGrammar
from paceline.parsing.tools import Tool

PYTHON_TAG = "<|python_tag|>"


def read_calls(source: Source, writer: Writer) -> Reading[None]:
    """One call or several; only tools that the model was told of are called, for an answer may be any JSON."""
    yield from read_envelope(source, writer, only_known=True)
    source.settle()
    while writer.may_call:
        yield from source.skip(SPACE + ";")
        if (yield from source.peek()) != "{":
            return
        yield from read_envelope(source, writer, only_known=True)
        source.settle()


def read_bare_calls(source: Source, writer: Writer) -> Reading[None]:
    source.at -= 1
    yield from read_calls(source, writer)


MARKERS = Markers(anywhere={PYTHON_TAG: read_calls}, first={"{": read_bare_calls})


def calls_grammar(grammar: CallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    calls = [grammar.call(envelope_head(tool.name, "parameters"), tool, "}") for tool in tools]
    return grammar.listed(calls, "; ", several=several)
