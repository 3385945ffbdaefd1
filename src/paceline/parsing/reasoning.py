"""Thoughts between two markers, as most models that think write them."""

from paceline.parsing.event_sink import EventSink
from paceline.parsing.output_parser import Markers, ParseMarkup
from paceline.parsing.text_stream import Parse, TextStream

THINK = ("<think>", "</think>")
MISTRAL = ("[THINK]", "[/THINK]")
GEMMA4 = ("<|channel>", "<channel|>")


def reasoning_until(close: str, label: str = "") -> ParseMarkup:
    """Reads thoughts up to `close`, or to the end of the answer. Line ends around them are markup.

    Args:
        label: what must stand behind the opening marker.
    """

    def read(stream: TextStream, sink: EventSink) -> Parse[None]:
        yield from stream.expect(label)
        yield from stream.skip("\n")
        stream.mark_emitted()
        if (yield from stream.emit_until((close,), sink.reasoning, held="\n")) is not None:
            stream.at += len(close)

    return read


think, mistral = reasoning_until(THINK[1]), reasoning_until(MISTRAL[1])
THINK_MARKERS = Markers(first={THINK[0]: think})
MISTRAL_MARKERS = Markers(anywhere={MISTRAL[0]: mistral})
GEMMA4_MARKERS = Markers(anywhere={GEMMA4[0]: reasoning_until(GEMMA4[1], "thought")})
