"""Thoughts between two markers, as most models that think write them."""

from paceline.parsing.event_sink import Writer
from paceline.parsing.output_parser import Markers, ReadMarkup
from paceline.parsing.text_stream import Reading, Source

THINK = ("<think>", "</think>")
MISTRAL = ("[THINK]", "[/THINK]")
GEMMA4 = ("<|channel>", "<channel|>")


def thoughts_until(close: str, label: str = "") -> ReadMarkup:
    """Reads thoughts up to `close`, or to the end of the answer. Line ends around them are markup.

    Args:
        label: what must stand behind the opening marker.
    """

    def read(source: Source, writer: Writer) -> Reading[None]:
        yield from source.expect(label)
        yield from source.skip("\n")
        source.settle()
        if (yield from source.told_until((close,), writer.reasoning, held="\n")) is not None:
            source.at += len(close)

    return read


think, mistral = thoughts_until(THINK[1]), thoughts_until(MISTRAL[1])
THINK_MARKERS = Markers(first={THINK[0]: think})
MISTRAL_MARKERS = Markers(anywhere={MISTRAL[0]: mistral})
GEMMA4_MARKERS = Markers(anywhere={GEMMA4[0]: thoughts_until(GEMMA4[1], "thought")})
