"""Thoughts between two markers, as most models that think write them."""

from paceline.server.markup.answer import Markers, ReadMarkup
from paceline.server.markup.source import Reading, Source
from paceline.server.markup.writer import Writer

THINK = "<think>"
MISTRAL = "[THINK]"
GEMMA4 = "<|channel>"


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


think, mistral = thoughts_until("</think>"), thoughts_until("[/THINK]")
THINK_MARKERS = Markers(first={THINK: think})
MISTRAL_MARKERS = Markers(anywhere={MISTRAL: mistral})
GEMMA4_MARKERS = Markers(anywhere={GEMMA4: thoughts_until("<channel|>", "thought")})
