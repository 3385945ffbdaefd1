"""<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>, with line ends or without: GLM 4.5 to 4.7."""

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ToolCallFormat, call_list
from paceline.parsing.tagged_calls import TaggedCallFormat
from paceline.parsing.text_stream import NAME_CHARACTER, MalformedError, Parse, TextStream

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
TOKENS = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
TAGS = TaggedCallFormat(open=OPEN, close=CLOSE, parameter=KEY, key_end=KEY_END, value=VALUE, parameter_end=VALUE_END)


def read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse a call after one or more opening marks. Without arguments its name must be a tool's, because it may be any word."""
    yield from stream.skip_repeated(OPEN)
    if sink.num_calls and (yield from stream.peek()) == "":  # an opening mark where a closing one should be
        return
    name = yield from stream.matching(NAME_CHARACTER)
    yield from stream.skip()
    following = yield from stream.one_of((KEY, CLOSE))
    if not name or (not sink.has_tool(name) and following != KEY) or (following is None and (yield from stream.peek()) != ""):
        raise MalformedError
    stream.mark_emitted()
    with sink.call(name):
        sink.arguments("{")
        yield from TAGS.read_parameters(stream, sink, sink.schema_of(name))
    yield from stream.pass_end_mark(CLOSE)


# arguments come in the schema's order; of a string's keywords only `enum` is enforced
calls_grammar = call_list(
    lambda grammar, tool: f"{grammar.literal(OPEN + tool.name)} {TAGS.pairs_grammar(grammar, tool)} {grammar.literal(CLOSE)}", "\n"
)
FORMAT = ToolCallFormat({OPEN: read_call}, (OPEN, KEY), TOKENS, calls_grammar, OPEN)
