"""[TOOL_CALLS][{"name": …, "arguments": {…}}, …] or, newer, [TOOL_CALLS]name[ARGS]{…}: Mistral, Devstral and Ministral."""

from collections.abc import Sequence

from paceline.parsing.events import EventSink, short_call_id
from paceline.parsing.formats import ReasoningFormat, ToolCallFormat
from paceline.parsing.json_call import emit_arguments, json_call_head, read_json_calls, skip_closers
from paceline.parsing.reasoning import ReasoningReader
from paceline.parsing.text_stream import NAME_CHARACTER, MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

THINK = ("[THINK]", "[/THINK]")
OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
read_reasoning = ReasoningReader(THINK[1], open=THINK[0])


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse a list of calls, or one call, after one or more opening marks."""
    yield from stream.skip_repeated(OPEN)
    char = yield from stream.peek()
    if char and char in "[{`":
        yield from read_json_calls(stream, sink)
    else:
        yield from _read_named(stream, sink)


def _read_named(stream: TextStream, sink: EventSink) -> Parse[None]:
    name = yield from stream.matching(NAME_CHARACTER)
    if not name:
        raise MalformedError
    yield from stream.skip()
    if (yield from stream.take(CALL_ID)):
        yield from stream.matching(NAME_CHARACTER)
    has_mark = yield from stream.take(ARGS)
    yield from stream.skip()
    if not has_mark and (yield from stream.peek()) != "{":
        raise MalformedError
    yield from emit_arguments(stream, sink, name)
    yield from skip_closers(stream)


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    if ARGS in grammar.token_ids:
        return grammar.listed([grammar.call(f"{OPEN}{tool.name}{ARGS}", tool) for tool in tools], "", several=several)
    calls = [grammar.call(json_call_head(tool.name), tool, "}") for tool in tools]
    return f'{grammar.literal(OPEN + "[")} {grammar.listed(calls, ", ", several=several)} "]"'


FORMAT = ToolCallFormat({OPEN: read_calls}, (OPEN,), (OPEN, ARGS, CALL_ID), calls_grammar, OPEN, new_id=short_call_id)
REASONING_FORMAT = ReasoningFormat({THINK[0]: read_reasoning}, THINK[:1], THINK, *THINK, read_reasoning)
