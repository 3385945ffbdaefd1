"""From a neutral chat request to neutral events: the one way by which every dialect's chats are answered."""

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
from paceline.parsing.event_sink import EventSink
from paceline.parsing.events import TOOL_CALLS, Answer, Event, Finished, Step
from paceline.parsing.registry import NONE, OutputFormat
from paceline.parsing.text_stream import StreamParser
from paceline.parsing.tool_call_grammar import arguments_schema
from paceline.sampling.grammar import Grammar
from paceline.sampling.matcher import GrammarCompiler
from paceline.server.chat_request import ChatRequest, check_tools
from paceline.server.dialogue.answer_grammar import answer_grammar
from paceline.server.generation import Generation, GenerationRequest
from paceline.tokenizer.tokenizer import Tokenizer

_PROMPT_TAIL = 16  # tokens of a prompt's end that are searched for thoughts it begins


class ChatService:
    """Answers chats.

    Args:
        formats: how the model writes calls and thoughts.
    """

    def __init__(self, generation: Generation, formats: OutputFormat) -> None:
        self._generation = generation
        self.formats = formats

    def check(self, request: ChatRequest) -> None:
        """Check that this model can answer a request. `collect` and `stream` check it too.

        Raises:
            RequestError: it cannot.
        """
        check_tools(request)
        check_template_options(self._tokenizer, request.template_options)
        if request.offered_tools and not self._tokenizer.template_takes("tools"):
            raise RequestError("tools cannot be called: this model's chat template does not know them; leave them out", parameter="tools")
        if request.offered_tools and self.formats.tools == NONE:
            raise RequestError(
                "tools cannot be called: how this model writes calls is not known; name its format with --tool-call-parser",
                parameter="tools",
            )

    def prompt_ids(self, request: ChatRequest) -> list[int]:
        """The token ids of a request's prompt. Takes time: call it in a thread.

        Raises:
            RequestError: as `check`, or the chat template rejects the conversation.
        """
        self.check(request)
        return request.prompt(self._generation.engine.opened.maker).token_ids

    def thinking_options(self, *, thinks: bool | None = None, effort: str | None = None) -> dict[str, Any]:
        """The chat template's variables for whether to think, and how much.

        Args:
            thinks: None = as the model does by default.
            effort: "none" included; None = as the model does by default.

        Raises:
            RequestError: the template has no variable for it, and the model does not do so by default. `parameter` is "thinking" or
                "reasoning_effort".
        """
        takes = self._tokenizer.template_takes
        if effort is not None and takes("reasoning_effort"):
            return {"reasoning_effort": effort}
        chosen = thinks if effort is None else effort != "none"
        is_default = effort is None and chosen == (self.formats.think != NONE)
        if chosen is None or (is_default and not takes("enable_thinking")):
            return {}
        if takes("enable_thinking"):
            return {"enable_thinking": chosen}
        name = "thinking" if effort is None else "reasoning_effort"
        raise RequestError(
            f"{name} is not served: this model's chat template has no variable for it; write in a message how to think",
            parameter=name,
            code="unsupported_parameter",
        )

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
    """One request while it is answered: whether its prompt begins thoughts, and a parser for each sample."""

    request: ChatRequest
    formats: OutputFormat
    tokenizer: Tokenizer
    in_reasoning: bool = False
    samples: dict[int, tuple[EventSink, StreamParser]] = field(default_factory=dict)

    def job(self) -> GenerationRequest:
        """What the engine generates."""
        shown = [self.tokenizer.added_token_id(token) for token in self.formats.tokens(self.request.offered_tools)]
        options = RequestOptions(**self.request.options)
        if ids := [token_id for token_id in shown if token_id is not None]:
            options["shown_token_ids"] = ids
        return GenerationRequest(
            prompt_ids=self._prompt_ids,
            params=self.request.params,
            options=options,
            takes_the_rest=self.request.takes_the_rest,
            grammar=self._grammar,
        )

    def events(self, sample: int, text: str, output: RequestOutput | None) -> list[Event]:
        """Events of a sample's next text, and its end if `output` is given."""
        sink, parser = self._sample(sample)
        parser.push(text)
        if output is None:
            return sink.take()
        parser.finish()
        called = sink.num_complete > 0 and output.finish_reason == "stop"
        return [*sink.take(), Finished(sample, output, TOOL_CALLS if called else output.finish_reason)]

    def answer(self, output: RequestOutput) -> Answer:
        """The whole of a sample."""
        return Answer.of(self.events(output.sample_index, output.text, output))

    def _sample(self, sample: int) -> tuple[EventSink, StreamParser]:
        if sample not in self.samples:
            sink = self.formats.sink(sample, self.request.offered_tools, several=self.request.parallel_tool_calls)
            self.samples[sample] = sink, self.formats.reading(self.request.offered_tools, sink, in_reasoning=self.in_reasoning)
        return self.samples[sample]

    def _prompt_ids(self, maker: RequestMaker) -> list[list[int]]:
        ids = maker.prompt_ids(self.request.prompt(maker).token_ids)
        self.in_reasoning = self.formats.has_opened_thoughts(self._text(ids[-_PROMPT_TAIL:]))
        return [ids]

    def _grammar(self) -> Grammar | None:
        return answer_grammar(self.request, self.formats, self.tokenizer, in_reasoning=self.in_reasoning)

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def schema_error(request: ChatRequest, error: RequestError, compiler: GrammarCompiler) -> RequestError:
    """The error of a request whose grammar does not compile: a schema that does not by itself, or all of them together.

    Takes time, because schemas are compiled.
    """
    if error.code is not None:  # the schemas may be right: compiling them takes too much
        return RequestError(str(error).replace("grammar", "tools", 1), parameter="tools", code=error.code)
    form = request.params.grammar
    if form is not None and (wrong := _compile_error(form, compiler)) is not None:
        return wrong
    for tool in request.offered_tools:
        if (wrong := _compile_error(Grammar.json_schema(arguments_schema(tool)), compiler)) is not None:
            reason = str(wrong).removeprefix("grammar: ")
            return RequestError(
                f"{tool.place} is no schema that arguments can be held to ({reason}): send another one", parameter=tool.place
            )
    text = "the schemas of the tools cannot be held to together: send fewer tools, simpler schemas, or tool_choice auto without strict"
    return RequestError(f"tools: {text}", parameter="tools")


def _compile_error(grammar: Grammar, compiler: GrammarCompiler) -> RequestError | None:
    try:
        compiler.matcher(grammar)
    except RequestError as error:
        return error
    return None
