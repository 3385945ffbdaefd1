"""Thoughts followed by an answer that has marks of its own, which are no part of the text."""

from paceline.parsing.event_sink import EventSink
from paceline.parsing.output_parser import Markers, ParseMarkup
from paceline.parsing.reasoning import THINK
from paceline.parsing.text_stream import MalformedError, Parse, TextStream

GRANITE = ("Here is my thought process:", "Here is my response:")
_GRANITE_SHORT = ("Here's my thought process:", "Here's my response:")  # as quantised models write
COHERE = ("<|START_THINKING|>", "<|END_THINKING|>")
COHERE_ANSWER = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
RESPONSE = ("<response>", "</response>")
ANSWER = ("<answer>", "</answer>")


def reasoning_before(closes: tuple[str, ...], answer: tuple[str, ...] = ()) -> ParseMarkup:
    """Return a function that parses thoughts up to one of `closes`, and `answer` if it follows."""

    def read(stream: TextStream, sink: EventSink) -> Parse[None]:
        yield from stream.skip("\n")
        stream.mark_emitted()
        close = yield from stream.emit_until(closes, sink.reasoning, held="\n")
        stream.at += len(close or "")
        stream.mark_emitted()
        yield from stream.skip()
        for mark in answer:
            if (yield from stream.take(mark)):
                return

    return read


def drop_mark(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Leave a mark out of the text."""
    yield from ()


def drop_end(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Leave an end mark out of the text where the answer ends or more markup follows."""
    yield from stream.skip()
    if (yield from stream.peek()) not in ("", "<"):
        raise MalformedError


def tagged_markers(answer: tuple[str, str]) -> Markers:
    """Thoughts between the usual marks, and an answer between `answer`."""
    return Markers(anywhere={answer[1]: drop_end}, first={THINK[0]: reasoning_before(THINK[1:], answer[:1]), answer[0]: drop_mark})


RESPONSE_MARKERS, ANSWER_MARKERS = tagged_markers(RESPONSE), tagged_markers(ANSWER)
response, answer = reasoning_before(THINK[1:], RESPONSE[:1]), reasoning_before(THINK[1:], ANSWER[:1])
granite = reasoning_before((GRANITE[1], _GRANITE_SHORT[1]))
GRANITE_MARKERS = Markers(first={GRANITE[0]: granite, _GRANITE_SHORT[0]: granite})
cohere = reasoning_before(COHERE[1:])
COHERE_MARKERS = Markers(anywhere={COHERE[0]: cohere, **dict.fromkeys(COHERE_ANSWER, drop_mark)})
