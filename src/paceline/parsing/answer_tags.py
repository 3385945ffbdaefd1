"""Parses reasoning that is followed by an answer between marks of its own, which are not part of the answer's text."""

from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import ReasoningFormat
from paceline.parsing.markers import Markers
from paceline.parsing.reasoning import THINK, ReasoningReader, drop_mark, think
from paceline.parsing.text_stream import MalformedError, Parse, TextStream

RESPONSE = ("<response>", "</response>")
APRIEL, APRIEL_END = ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"), "[END FINAL RESPONSE]"


def drop_open(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Drop an opening mark at the beginning of the text."""
    yield from ()
    if sink.has_text:
        raise MalformedError


def drop_close(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Drop a closing mark at the end of the answer or before more markup."""
    yield from stream.skip()
    if (yield from stream.peek()) not in ("", "<"):
        raise MalformedError


def think_before(answer: tuple[str, str]) -> ReasoningFormat:
    """Return the format of reasoning between <think> and </think>, and of an answer between `answer`."""
    markers = Markers(anywhere={answer[0]: drop_open, answer[1]: drop_close}, first={THINK[0]: think, THINK[1]: drop_mark})
    return ReasoningFormat(markers, (THINK[1], answer[0], "!<invoke"), (*THINK, *answer), *THINK, think)


ERNIE45_FORMAT = think_before(RESPONSE)
_read_apriel = ReasoningReader(APRIEL[1], open=APRIEL[0])
_APRIEL_MARKERS = Markers(anywhere={APRIEL_END: drop_mark}, first={APRIEL[0]: _read_apriel, APRIEL[1]: drop_mark})
APRIEL_FORMAT = ReasoningFormat(_APRIEL_MARKERS, APRIEL, (), *APRIEL, _read_apriel)
