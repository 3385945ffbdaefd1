"""An engine that generates a given text."""

from collections.abc import AsyncGenerator, Sequence

import pytest

from paceline.outputs import RequestOutput, StreamChunk, Timing, Usage
from paceline.server.generation import Generation, GenerationRequest


def write_down(patch: pytest.MonkeyPatch, text: str, *, piece_len: int = 3, finish_reason: str = "stop") -> None:
    """Let every engine write `text`, in pieces of so many characters."""
    pieces = [text[start : start + piece_len] for start in range(0, len(text), piece_len)]
    usage = Usage(5, len(pieces))
    output = RequestOutput(text, list(range(len(pieces))), [1] * 5, finish_reason, usage, Timing(0.1, 0.2), seed=1, numerics="exact")

    async def collect(_: Generation, job: GenerationRequest) -> list[RequestOutput]:
        job.prompt_ids(_.engine.loaded.input_processor)
        return [output]

    async def stream(_: Generation, job: GenerationRequest) -> AsyncGenerator[tuple[int, StreamChunk], None]:
        job.prompt_ids(_.engine.loaded.input_processor)
        for index, piece in enumerate(pieces):
            is_last = index == len(pieces) - 1
            yield 0, StreamChunk(piece, [index], [], output if is_last else None, usage=Usage(5, index + 1))

    patch.setattr(Generation, "collect", collect)
    patch.setattr(Generation, "stream", stream)


def kinds(events: Sequence[dict[str, object]]) -> list[object]:
    """The types of events, without consecutive duplicates of deltas."""
    found = [event["type"] for event in events]
    return [kind for index, kind in enumerate(found) if index == 0 or kind != found[index - 1] or not str(kind).endswith("delta")]
