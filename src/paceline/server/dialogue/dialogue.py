"""From a neutral request to neutral events: the one way by which every dialect's chats are answered."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from paceline.outputs import RequestOutput
from paceline.server.dialogue.events import Answer, Event, Finished, Step, Text
from paceline.server.dialogue.request import ChatRequest
from paceline.server.generation import Generation, Job


class Dialogue:
    """Answers chats."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def collect(self, request: ChatRequest) -> list[Answer]:
        """The whole answers, in order of their samples.

        Raises:
            HttpError, PacelineError: as `Generation.collect`.
        """
        outputs = await self._generation.collect(self._job(request))
        return [Answer.of([*_read(output.sample_index, output.text), *_end(output)]) for output in outputs]

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Step, None]:
        """What every step adds; the samples of a request are mixed. The rest as for `collect`."""
        async with aclosing(self._generation.stream(self._job(request))) as stream:
            async for _, chunk in stream:
                events = _read(chunk.sample_index, chunk.text)
                if chunk.output is not None:
                    events += _end(chunk.output)
                yield Step(chunk.sample_index, chunk, tuple(events))

    def _job(self, request: ChatRequest) -> Job:
        return Job(
            prompt_ids=lambda maker: [maker.chat_ids(request.messages)],
            params=request.params,
            options=request.options,
            takes_the_rest=request.takes_the_rest,
        )


def _read(sample: int, text: str) -> list[Event]:
    return [Text(sample, text)] if text else []


def _end(output: RequestOutput) -> list[Event]:
    return [Finished(output.sample_index, output, output.finish_reason)]
