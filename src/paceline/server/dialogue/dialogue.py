"""From a neutral request to neutral events: the one way by which every dialect's chats are answered."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.batch import RequestMaker
from paceline.engine.chat_prompt import check_template_options
from paceline.engine.inputs import RequestOptions
from paceline.errors import RequestError
from paceline.outputs import RequestOutput
from paceline.parsing.answer_grammar import answer_grammar
from paceline.parsing.events import TOOL_CALLS, Answer, Event, Finished, Step
from paceline.parsing.registry import NONE, OutputFormat, OutputStream
from paceline.sampling.grammar import Grammar
from paceline.server.dialogue.request import ChatRequest
from paceline.server.dialogue.thinking import thinking_options
from paceline.server.dialogue.tools import check_tools, schema_error
from paceline.server.generation import Generation, Job
from paceline.tokenizer.tokenizer import Tokenizer

_PROMPT_TAIL = 16  # tokens of a prompt's end that are looked at for thoughts it begins


class Dialogue:
    """Answers chats.

    Args:
        formats: how the model writes calls and thoughts.
    """

    def __init__(self, generation: Generation, formats: OutputFormat) -> None:
        self._generation = generation
        self.formats = formats

    def check(self, request: ChatRequest) -> None:
        """That a request can be served by this model; `collect` and `stream` check it too.

        Raises:
            RequestError: it cannot.
        """
        check_tools(request)
        check_template_options(self._tokenizer, request.template_options)
        if request.offered_tools and self.formats.tool_call_parser == NONE:
            raise RequestError(
                "tools cannot be called: how this model writes calls is not known; name its format with --tools-format", parameter="tools"
            )

    def thinking_options(self, *, thinks: bool | None = None, effort: str | None = None) -> dict[str, Any]:
        """What the chat template is told of thinking, as `thinking.thinking_options`."""
        return thinking_options(self._tokenizer, thinks=thinks, effort=effort, always=self.formats.reasoning_parser != NONE)

    async def collect(self, request: ChatRequest) -> list[Answer]:
        """The whole answers, in order of their samples.

        Raises:
            HttpError, PacelineError: as `Generation.collect`, or as `check`.
        """
        turn = self._turn(request)
        try:
            return [turn.answer(output) for output in await self._generation.collect(turn.job())]
        except RequestError as error:
            raise await self._explained(request, error) from error

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Step, None]:
        """What every step adds; the samples of a request are mixed. The rest as for `collect`."""
        turn = self._turn(request)
        async with aclosing(self._generation.stream(turn.job())) as stream:
            try:
                async for _, chunk in stream:
                    yield Step(chunk.sample_index, chunk, tuple(turn.events(chunk.sample_index, chunk.text, chunk.output)))
            except RequestError as error:
                raise await self._explained(request, error) from error

    async def _explained(self, request: ChatRequest, error: RequestError) -> RequestError:
        """The same error, about the schema of a tool where that is what does not compile."""
        if not request.offered_tools or not str(error).startswith("grammar: "):  # as those of the compiler do
            return error
        return await asyncio.to_thread(schema_error, request, error, self._generation.engine.opened.maker.compiler)

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._generation.engine.opened.maker.tokenizer

    def _turn(self, request: ChatRequest) -> "_Turn":
        self.check(request)
        return _Turn(request, self.formats, self._tokenizer)


@dataclass(slots=True)
class _Turn:
    """One request on its way: what its prompt has begun, and how far its samples were read."""

    request: ChatRequest
    formats: OutputFormat
    tokenizer: Tokenizer
    in_reasoning: bool = False
    samples: dict[int, OutputStream] = field(default_factory=dict)

    def job(self) -> Job:
        """What the engine is to do."""
        shown = [self.tokenizer.added_token_id(token) for token in self.formats.tokens(self.request.offered_tools)]
        options = RequestOptions(**self.request.options)
        if ids := [token_id for token_id in shown if token_id is not None]:
            options["shown_token_ids"] = ids
        return Job(
            prompt_ids=self._prompt_ids,
            params=self.request.params,
            options=options,
            takes_the_rest=self.request.takes_the_rest,
            grammar=self._grammar,
        )

    def events(self, sample: int, text: str, output: RequestOutput | None) -> list[Event]:
        """What a sample's next text says, and its end if `output` is given."""
        stream = self._sample(sample)
        events = stream.push(text)
        if output is None:
            return events
        events += stream.finish()
        called = stream.sink.num_complete > 0 and output.finish_reason == "stop"
        return [*events, Finished(sample, output, TOOL_CALLS if called else output.finish_reason)]

    def answer(self, output: RequestOutput) -> Answer:
        """The whole of a sample."""
        return Answer.of(self.events(output.sample_index, output.text, output))

    def _sample(self, sample: int) -> OutputStream:
        if sample not in self.samples:
            tools, several = self.request.offered_tools, self.request.parallel_tool_calls
            self.samples[sample] = self.formats.stream(tools, sample=sample, several=several, in_reasoning=self.in_reasoning)
        return self.samples[sample]

    def _prompt_ids(self, maker: RequestMaker) -> list[list[int]]:
        ids = maker.prompt_ids(self.request.prompt(maker).token_ids)
        self.in_reasoning = self.formats.has_opened_reasoning(self._text(ids[-_PROMPT_TAIL:]))
        return [ids]

    def _grammar(self) -> Grammar | None:
        return answer_grammar(
            self.formats,
            self.tokenizer,
            self.request.offered_tools,
            tool_use=self.request.tool_use,
            tool_name=self.request.tool_name,
            several=self.request.parallel_tool_calls,
            grammar=self.request.params.grammar,
            in_reasoning=self.in_reasoning,
        )

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)
