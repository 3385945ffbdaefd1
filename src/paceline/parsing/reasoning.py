"""Parses reasoning between two marks, the form of most models.

A call within reasoning counts as a call only if the reasoning is never closed. So text from a call's opening mark on is held back until
the closing mark or the end of the text arrives.
"""

from collections.abc import Mapping
from dataclasses import replace

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ParseMarkup, ReasoningFormat
from paceline.parsing.text_stream import MalformedError, Parse, TextStream

THINK = ("<think>", "</think>")
APRIEL = ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")


class ReasoningReader:
    """Reads reasoning up to its closing mark. Line ends around the reasoning are markup.

    Args:
        open: the opening mark, which models repeat after a prompt that ends with it; empty = it is not searched for.
        close: the closing mark.
    """

    def __init__(self, close: str, open: str = "") -> None:
        self._open, self._close = open, close

    def __call__(self, stream: TextStream, sink: EventSink, calls: Mapping[str, ParseMarkup] | None = None) -> Parse[None]:
        """Pass the reasoning and its closing mark.

        Args:
            calls: parsers of calls by their opening marks.
        """
        yield from stream.skip("\n")
        while self._open and (yield from stream.take(self._open)):
            yield from stream.skip("\n")
        stream.mark_emitted()
        marks = (self._close, *(calls or {}))
        is_never_closed = False
        while (mark := (yield from stream.emit_until(marks, sink.reasoning, held="\n"))) is not None:
            if mark == self._close:
                stream.at += len(mark)
                return
            is_never_closed = is_never_closed or not (yield from self._is_closed(stream))
            if not is_never_closed:
                end = stream.text.find(self._close, stream.at)
                sink.reasoning(stream.text[stream.num_emitted : end].rstrip("\n"))
                stream.at = end
                stream.mark_emitted()
            elif (yield from self._read_call(mark, stream, sink, calls or {})):
                return

    def _read_call(self, mark: str, stream: TextStream, sink: EventSink, calls: Mapping[str, ParseMarkup]) -> Parse[bool]:
        """Return whether a call follows its opening mark; otherwise the text that was passed is reasoning."""
        stream.at += len(mark)
        num_calls, begin = sink.num_calls, stream.position
        try:
            yield from calls[mark](stream, sink)
        except MalformedError:
            stream.pass_to(begin)
            emit = sink.text if sink.num_calls > num_calls else sink.reasoning
            emit(stream.unemitted)
        stream.mark_emitted()
        return sink.num_calls > num_calls

    def _is_closed(self, stream: TextStream) -> Parse[bool]:
        """Return whether the closing mark is in the text that follows, once it or the end of the text has come."""
        num_searched = 0
        while stream.text.find(self._close, stream.at + num_searched) < 0:
            if stream.has_ended:
                return False
            num_searched = max(num_searched, len(stream.text) - len(self._close) + 1 - stream.at)
            yield
        return True


def drop_mark(stream: TextStream, sink: EventSink) -> Parse[None]:
    yield from ()


think = ReasoningReader(THINK[1], open=THINK[0])


def reasoning_format(open: str, close: str, signs: tuple[str, ...] = ()) -> ReasoningFormat:
    """Return the format of reasoning between two tokens, before the answer. A closing token before all text is dropped.

    Args:
        signs: texts that show the format in a chat template; the closing token if there are none.
    """
    reader = ReasoningReader(close, open=open)
    return ReasoningFormat({}, signs or (close,), (open, close), open, close, reader, first={open: reader, close: drop_mark})


THINK_FORMAT = reasoning_format(*THINK)


def _drop_open(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Drop an opening mark at the beginning of the text."""
    yield from ()
    if sink.has_text:
        raise MalformedError


def _drop_close(stream: TextStream, sink: EventSink) -> Parse[None]:
    """Drop a closing mark at the end of the answer or before more markup."""
    yield from stream.skip()
    if (yield from stream.peek()) not in ("", "<"):
        raise MalformedError


def think_before(answer: tuple[str, str]) -> ReasoningFormat:
    """Return the format of reasoning between <think> and </think>, and of an answer between `answer`."""
    anywhere, signs = {answer[0]: _drop_open, answer[1]: _drop_close}, (THINK[1], answer[0], "!<invoke")
    return ReasoningFormat(anywhere, signs, (*THINK, *answer), *THINK, think, first=THINK_FORMAT.first)


ERNIE45_FORMAT = think_before(("<response>", "</response>"))
APRIEL_FORMAT = replace(
    reasoning_format(*APRIEL, APRIEL),  # phrases, not tokens
    anywhere={"[END FINAL RESPONSE]": drop_mark},
    tokens=(),
)
