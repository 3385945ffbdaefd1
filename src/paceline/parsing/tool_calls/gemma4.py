"""<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>: Gemma 4."""

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ReasoningFormat, ToolCallFormat, call_list
from paceline.parsing.json_call import emit_object_call, skip_closers
from paceline.parsing.lenient_json import RawQuotes
from paceline.parsing.reasoning import ReasoningReader, drop_mark
from paceline.parsing.text_stream import NAME_CHARACTER, WHITESPACE, MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar, quoted_object_grammar
from paceline.parsing.tools import Tool

THINK = ("<|channel>", "<channel|>")
OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CALL, _LABEL = "call:", "thought"
_RESPONSE = "<|tool_response>"  # begins the result of a call; at times the model generates it itself
_QUOTES = RawQuotes(QUOTE, OPEN, CLOSE)
_READER = ReasoningReader(THINK[1])


def read_calls(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse the calls of a block after one or more opening marks."""
    yield from stream.skip_repeated(OPEN)
    if sink.num_calls and (yield from stream.peek()) == "":  # an opening mark where a closing one should be
        return
    yield from stream.take(_CALL)
    yield from _read_call(stream, sink)
    while sink.can_call:
        yield from stream.skip(WHITESPACE + ",;")
        if not (yield from stream.take(_CALL)):
            break
        yield from _read_call(stream, sink)
    yield from stream.pass_end_mark(CLOSE)
    yield from stream.take_or_end(_RESPONSE)


def _read_call(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from stream.skip()
    name = yield from stream.matching(NAME_CHARACTER)
    yield from stream.skip()
    yield from emit_object_call(stream, sink, name, raw=_QUOTES)
    yield from skip_closers(stream)
    while (yield from stream.take(QUOTE)):
        yield from skip_closers(stream)


def drop_stray_mark(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Leave a mark after a call out of the text."""
    yield from ()
    if not sink.num_calls:
        raise MalformedError


def read_reasoning(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse reasoning after one or more opening marks. Its label may be missing."""
    yield from stream.skip_repeated(THINK[0])
    if (yield from stream.one_of((f"{_LABEL}\n", _LABEL + THINK[1]))) is not None:
        stream.at += len(_LABEL)
    yield from _READER(stream, sink)


def call_grammar(grammar: ToolCallGrammar, tool: Tool) -> str:
    """Return a grammar of a call with properties in alphabetical order, as in the model's training data.

    Of texts only their `enum` is enforced, of lists no length.
    """
    head = grammar.literal(f"{OPEN}call:{tool.name}")
    return f"{head} {quoted_object_grammar(grammar, tool, QUOTE, is_sorted=True)} {grammar.literal(CLOSE)}"


FORMAT = ToolCallFormat(
    {OPEN: read_calls, **dict.fromkeys((CLOSE, _RESPONSE), drop_stray_mark)}, (OPEN,), (OPEN, CLOSE, QUOTE), call_list(call_grammar), OPEN
)
REASONING_FORMAT = ReasoningFormat({THINK[0]: read_reasoning, THINK[1]: drop_mark}, THINK[:1], THINK, "<|channel>thought\n", THINK[1])
