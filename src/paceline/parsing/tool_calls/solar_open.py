"""Messages of the kinds think, content and tool_calls; calls have id, name and JSON: Solar Open.

The prompt ends with the role of the first message.
"""

from collections.abc import Sequence

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ReasoningFormat, ToolCallFormat, section_of
from paceline.parsing.json_call import emit_arguments, skip_closers
from paceline.parsing.reasoning import ReasoningReader, drop_mark
from paceline.parsing.text_stream import NAME_CHARACTER, MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

OPEN, CLOSE = "<|tool_calls|>", "<|calls|>"
CALL, NAME, ARGUMENTS, CALL_END = "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"
BEGIN, CONTENT, END = "<|begin|>assistant", "<|content|>", "<|end|>"
THINK = ("<|think|>", END)
TOKENS = (OPEN, CLOSE, CALL, NAME, ARGUMENTS, CALL_END)


def _read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    call_id = yield from stream.matching(NAME_CHARACTER)
    yield from stream.expect(NAME)
    name = (yield from stream.until(ARGUMENTS)).strip()
    if not name or not name.isprintable():
        raise MalformedError
    yield from stream.skip()
    yield from emit_arguments(stream, sink, name, call_id or None)
    yield from skip_closers(stream)
    yield from stream.take_or_end(CALL_END)
    yield from stream.skip()
    stream.mark_emitted()


read_reasoning = ReasoningReader(THINK[1])
_ANSWER = dict.fromkeys((BEGIN, CONTENT, END), drop_mark)


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Return a grammar of calls with ids of ten characters, after the role if reasoning came before."""
    calls = [f"{grammar.literal(CALL)} /[a-z0-9]{{10}}/ {grammar.call(f'{NAME}{tool.name}{ARGUMENTS}', tool, CALL_END)}" for tool in tools]
    return f"({grammar.literal(BEGIN)})? {grammar.literal(OPEN)} {grammar.listed(calls, '', several=several)} {grammar.literal(CLOSE)}"


FORMAT = ToolCallFormat({OPEN: section_of(CALL, _read_call, CLOSE), **_ANSWER}, (OPEN, ARGUMENTS), TOKENS, calls_grammar, OPEN)
REASONING_FORMAT = ReasoningFormat(
    {THINK[0]: read_reasoning, **_ANSWER}, (THINK[0], CONTENT), (*THINK, "<|begin|>", CONTENT), *THINK, read_reasoning
)
