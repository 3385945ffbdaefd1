"""<|tools_prefix|>[{"f": {…}}, {"g": {}}]<|tools_suffix|>: Apertus.

Reasoning is between <|inner_prefix|> and <|inner_suffix|>; a call within it ends it.
"""

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ReasoningFormat, ToolCallFormat, call_list
from paceline.parsing.json_call import emit_object_call
from paceline.parsing.lenient_json import read_short_string
from paceline.parsing.reasoning import drop_mark
from paceline.parsing.text_stream import MalformedError, Parse, TextStream

OPEN, CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"
THINK = ("<|inner_prefix|>", "<|inner_suffix|>")


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    is_list = yield from stream.take("[")
    while True:
        yield from _read_call(stream, sink)
        yield from stream.skip()
        if not sink.can_call or not (yield from stream.take(",")):
            break
        yield from stream.skip()
        if (yield from stream.peek()) in ("]", ""):
            break
    if is_list:
        yield from stream.take("]")
        yield from stream.skip()
    if not (yield from stream.take_or_end(CLOSE)):
        raise MalformedError


def _read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    yield from stream.expect("{")
    yield from stream.skip()
    name = yield from read_short_string(stream)
    yield from stream.skip()
    yield from stream.expect(":")
    yield from stream.skip()
    yield from emit_object_call(stream, sink, name)
    yield from stream.skip()
    yield from stream.take("}")
    stream.mark_emitted()


def read_reasoning(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip("\n")
    stream.mark_emitted()
    if (yield from stream.emit_until((THINK[1], OPEN), sink.reasoning, held="\n")) == THINK[1]:
        stream.at += len(THINK[1])


calls_grammar = call_list(lambda grammar, tool: grammar.call(f'{{"{tool.name}": ', tool, "}"), ", ", f"{OPEN}[", f"]{CLOSE}")
FORMAT = ToolCallFormat({OPEN: read_calls}, (OPEN,), (OPEN, CLOSE), calls_grammar, OPEN)
REASONING_FORMAT = ReasoningFormat({THINK[0]: read_reasoning, THINK[1]: drop_mark}, THINK[:1], THINK, *THINK, read_reasoning)
