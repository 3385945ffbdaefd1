"""Reasoning followed by an answer that has marks of its own, which are no part of the text."""

from paceline.parsing.event_sink import EventSink
from paceline.parsing.output_parser import Markers
from paceline.parsing.reasoning import THINK, reasoning_until, think
from paceline.parsing.text_stream import WHITESPACE, MalformedError, Parse, TextStream

GRANITE = ("Here is my thought process:", "Here is my response:")
_GRANITE_SHORT = ("Here's my thought process:", "Here's my response:")  # as quantised models write
COHERE = ("<|START_THINKING|>", "<|END_THINKING|>")
COHERE_ANSWER = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
RESPONSE = ("<response>", "</response>")
ANSWER = ("<answer>", "</answer>")


def read_granite(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Parse reasoning up to one of Granite's phrases. White space around the reasoning is markup."""
    yield from stream.skip()
    stream.mark_emitted()
    close = yield from stream.emit_until((GRANITE[1], _GRANITE_SHORT[1]), sink.reasoning, held=WHITESPACE)
    stream.at += len(close or "")


def drop_mark(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Leave a mark out of the text."""
    yield from ()


def drop_open(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Leave an opening mark out where the text begins."""
    yield from ()
    if sink.has_text:
        raise MalformedError


def drop_close(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Leave a closing mark out where the answer ends or more markup follows."""
    yield from stream.skip()
    if (yield from stream.peek()) not in ("", "<"):
        raise MalformedError


def _think_before(answer: tuple[str, str]) -> Markers:
    """Return the marks of reasoning between the usual ones, and of an answer between `answer`."""
    return Markers(anywhere={answer[0]: drop_open, answer[1]: drop_close}, first={THINK[0]: think})


RESPONSE_MARKERS, ANSWER_MARKERS = _think_before(RESPONSE), _think_before(ANSWER)
GRANITE_MARKERS = Markers(first={GRANITE[0]: read_granite, _GRANITE_SHORT[0]: read_granite})
cohere = reasoning_until(COHERE[1])
COHERE_MARKERS = Markers(anywhere={COHERE[0]: cohere, **dict.fromkeys(COHERE_ANSWER, drop_mark)})
