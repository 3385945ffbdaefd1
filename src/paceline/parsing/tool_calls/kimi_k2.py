"""A section of calls, each with an id (functions.name:0) and arguments: Kimi-K2."""

import re

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ToolCallFormat, call_list
from paceline.parsing.json_call import emit_arguments, skip_closers
from paceline.parsing.text_stream import MalformedError, Parse, TextStream

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
TOKENS = (OPEN, CLOSE, CALL, ARGUMENTS, CALL_END)
_ID = re.compile(r"(?:functions\.)?([\w.\-]+?)(:[0-9]+)?")
_ID_CHARACTER = re.compile(r"[^<{\s]")


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse the calls of a section after one or more opening marks."""
    yield from stream.skip_repeated(OPEN)
    yield from stream.expect(CALL)
    yield from read_bare_calls(stream, sink)


def read_bare_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse calls after the first one's opening mark, also without the section's opening mark."""
    yield from _read_call(stream, sink)
    while sink.can_call and (yield from stream.take(CALL)):
        yield from _read_call(stream, sink)
    yield from stream.pass_end_mark(CLOSE)


def _read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse one call. Its id is kept, because the chat template writes it again and the model reads the name in it."""
    yield from stream.skip_repeated(CALL)
    call_id = yield from stream.matching(_ID_CHARACTER)
    found = _ID.fullmatch(call_id)
    yield from stream.skip()
    has_mark = yield from stream.take(ARGUMENTS)
    yield from stream.skip()
    is_name = found is not None and (found[2] is not None or sink.has_tool(found[1]))
    if found is None or not is_name or not (has_mark or (yield from stream.peek()) == "{"):
        raise MalformedError
    is_whole = found[2] is not None and call_id.startswith("functions.")
    yield from emit_arguments(stream, sink, found[1], call_id if is_whole else f"functions.{found[1]}:{sink.num_calls}")
    yield from skip_closers(stream)
    yield from stream.pass_end_mark(CALL_END)


calls_grammar = call_list(
    lambda grammar, tool: f"{grammar.literal(f'{CALL}functions.{tool.name}:')} /[0-9]{{1,3}}/ {grammar.call(ARGUMENTS, tool, CALL_END)}",
    before=OPEN,
    after=CLOSE,
)
FORMAT = ToolCallFormat({OPEN: read_calls, CALL: read_bare_calls}, (OPEN, ARGUMENTS), TOKENS, calls_grammar, OPEN)
