"""Marks around type, name and fenced JSON, or name and bare JSON (V3.1): DeepSeek V3, R1 and V3.1."""

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ToolCallFormat, call_list, including_mark, section_of
from paceline.parsing.json_call import take_fence
from paceline.parsing.lenient_json import emit_json_object
from paceline.parsing.reasoning import drop_mark
from paceline.parsing.text_stream import MalformedError, Parse, TextStream

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
TOKENS = (OPEN, CLOSE, CALL, SEPARATOR, CALL_END)
TYPE = "function"
# marks of the results of tools, which the model at times writes itself; what is between them is text
_OUTPUTS = tuple(f"<｜tool▁{name}｜>" for name in ("outputs▁begin", "output▁begin", "output▁end", "outputs▁end"))
_OTHER_OPENS = ("<｜tool_calls_begin｜>", "<｜tool calls begin｜>", "<｜tool▁calls｜>")  # spelling of distilled models


def _read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    name = (yield from stream.until(SEPARATOR)).strip()
    yield from stream.skip()
    if name == TYPE and (yield from stream.peek()) not in ("{", "`"):
        name = (yield from stream.until("\n")).strip()
        yield from stream.skip()
    if not name or not name.isprintable() or "<" in name:
        raise MalformedError
    is_fenced = yield from take_fence(stream)
    has_arguments = (yield from stream.peek()) == "{"
    if not has_arguments and (yield from stream.one_of((CALL_END, "```"))) is None:
        raise MalformedError
    stream.mark_emitted()
    with sink.call(name):
        if has_arguments:
            yield from emit_json_object(stream, sink.arguments)
        else:
            sink.arguments("{}")
    stream.mark_emitted()
    yield from stream.skip()
    if is_fenced:
        yield from stream.take_or_end("```")
        yield from stream.skip()
    yield from stream.take_or_end(CALL_END)
    yield from stream.skip()
    stream.mark_emitted()


read_calls = section_of(CALL, _read_call, CLOSE)  # distilled models leave marks out
MARKERS = {
    **dict.fromkeys((OPEN, *_OTHER_OPENS), read_calls),
    CALL: including_mark(read_calls, len(CALL)),  # the outer mark is missing
    **dict.fromkeys(_OUTPUTS, drop_mark),
}
calls_grammar_v3 = call_list(
    lambda grammar, tool: grammar.call(f"{CALL}{TYPE}{SEPARATOR}{tool.name}\n```json\n", tool, f"\n```{CALL_END}"), "\n", OPEN, CLOSE
)
calls_grammar_v31 = call_list(lambda grammar, tool: grammar.call(f"{CALL}{tool.name}{SEPARATOR}", tool, CALL_END), "", OPEN, CLOSE)
FORMAT_V3 = ToolCallFormat(MARKERS, (OPEN, "```json"), TOKENS, calls_grammar_v3, OPEN)
FORMAT_V31 = ToolCallFormat(MARKERS, (OPEN,), TOKENS, calls_grammar_v31, OPEN)
