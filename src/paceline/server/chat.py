"""From a neutral chat request to neutral events: the one way by which every dialect's chats are answered."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.chat_prompt import RESERVED_OPTIONS, ChatOutputParser, check_template_options
from paceline.engine.input_processor import InputProcessor
from paceline.engine.inputs import RequestOptions
from paceline.errors import RequestError
from paceline.outputs import RequestOutput
from paceline.parsing.answer_grammar import answer_grammar
from paceline.parsing.events import TOOL_CALLS, Answer, Event, Finished, Step, parts_of
from paceline.parsing.registry import NONE, OutputFormat, OutputStream
from paceline.parsing.tool_call_grammar import arguments_schema
from paceline.sampling.grammars.compiler import GrammarCompiler
from paceline.sampling.grammars.grammar import Grammar
from paceline.server.chat_request import ChatRequest, check_tools
from paceline.server.fields import Fields
from paceline.server.generation import Generation, GenerationRequest
from paceline.tokenizer.tokenizer import Tokenizer


class ChatService:
    """Answers chats.

    Args:
        formats: formats of calls and reasoning.
    """

    def __init__(self, generation: Generation, formats: OutputFormat) -> None:
        self._generation = generation
        self.formats = formats

    def check(self, request: ChatRequest) -> None:
        """Raise RequestError if this model cannot answer a request. `collect` and `stream` check it too."""
        check_tools(request)
        check_template_options(self._tokenizer, request.template_options)
        if request.continue_final_message and request.params.grammar is not None:
            raise RequestError(
                "grammar: the output continues the last message, and a grammar holds for whole texts: end with a message of the user",
                parameter="grammar",
            )
        if request.offered_tools and self.formats.tool_call_parser == NONE:
            raise RequestError(
                "tools cannot be called: how this model writes calls is not known; name its format with --tool-call-parser",
                parameter="tools",
            )

    def prompt_ids(self, request: ChatRequest) -> list[int]:
        """Return the token ids of a request's prompt, with the errors of `check` and of the chat template. Slow: call it in a thread."""
        self.check(request)
        return request.prompt(self._generation.engine.loaded.input_processor).token_ids

    def thinking_options(self, fields: Fields, *, thinks: bool | None = None, effort: str | None = None) -> dict[str, Any]:
        """Return the chat template's variables that switch reasoning on or off and set its effort. Options without a variable are ignored.

        Agents send such fields to every model.

        Args:
            fields: of the request; what is ignored is added to those that are.
            thinks: None = as the model does by default.
            effort: "none" included; None = as the model does by default.
        """
        takes = self._tokenizer.template_uses
        if effort is not None and takes("reasoning_effort"):
            return {"reasoning_effort": effort}
        chosen = thinks if effort is None else effort != "none"
        if chosen is None:
            return {}
        if takes("enable_thinking"):
            return {"enable_thinking": chosen}
        fields.ignore("thinking" if effort is None else "reasoning_effort")
        return {}

    def template_options(self, fields: Fields, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the options that the chat template has a use for. The others are ignored, as vLLM, SGLang and llama.cpp do.

        Args:
            fields: of the request; what is ignored is added to those that are.
            given: the field `chat_template_kwargs`.

        Raises:
            RequestError: one is an argument of its own here.
        """
        found = dict[str, Any]()
        for name, value in (given or {}).items():
            if name in RESERVED_OPTIONS or self._tokenizer.template_uses(name):
                found[name] = value
            else:
                fields.ignore("template_options", name)
        check_template_options(self._tokenizer, found)
        return found

    async def collect(self, request: ChatRequest) -> list[Answer]:
        """Return the whole answers by sample, with the errors of `Generation.collect` and `check`."""
        turn = self._turn(request)
        try:
            return [turn.answer(output) for output in await self._generation.collect(turn.generation_request())]
        except RequestError as error:
            raise await self._explained(request, error) from error

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Step, None]:
        """Yield what each engine step adds. Steps of different samples are interleaved. Arguments and errors: see `collect`."""
        turn = self._turn(request)
        async with aclosing(self._generation.stream(turn.generation_request())) as stream:
            try:
                async for _, chunk in stream:
                    yield Step(chunk, tuple(turn.events(chunk.sample_index, chunk.text, chunk.output)))
            except RequestError as error:
                raise await self._explained(request, error) from error

    async def _explained(self, request: ChatRequest, error: RequestError) -> RequestError:
        """Return an error that names the tool whose schema does not compile, or `error` itself if another grammar is wrong."""
        if not request.offered_tools or not str(error).startswith("grammar: "):  # the compiler's errors begin so
            return error
        return await asyncio.to_thread(schema_error, request, error, self._generation.engine.loaded.input_processor.compiler)

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._generation.engine.loaded.input_processor.tokenizer

    def _turn(self, request: ChatRequest) -> "_Turn":
        self.check(request)
        return _Turn(request, self.formats, self._tokenizer)


@dataclass(slots=True)
class _Turn:
    """One request while it is answered: the parser of its outputs, known once its prompt is made, and the parsers of its samples."""

    request: ChatRequest
    formats: OutputFormat
    tokenizer: Tokenizer
    parser: ChatOutputParser = field(init=False)
    samples: dict[int, OutputStream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parser = ChatOutputParser(self.formats, tuple(self.request.offered_tools))

    def generation_request(self) -> GenerationRequest:
        """Return the request for the engine."""
        options = RequestOptions(**self.request.options)
        if ids := self.parser.shown_token_ids(self.tokenizer):
            options["shown_token_ids"] = ids
        return GenerationRequest(
            prompt_ids=self._prompt_ids,
            params=self.request.params,
            options=options,
            fills_context=self.request.fills_context,
            grammar=self._grammar,
        )

    def events(self, sample: int, text: str, output: RequestOutput | None) -> list[Event]:
        """Events of a sample's next text, and its end if `output` is given."""
        if sample not in self.samples:
            self.samples[sample] = self.parser.stream_parser(parallel_tool_calls=self.request.parallel_tool_calls)
        stream = self.samples[sample]
        events = stream.push(text)
        if output is None:
            return events
        events += stream.finish()
        sink = stream.sink
        cut = sink.broken_off if output.stop_text is None else sink.unclosed  # a stop text ended the call, not the model
        called = output.finish_reason == "stop" and sink.num_calls > 0 and not cut
        return [*events, Finished(output, TOOL_CALLS if called else output.finish_reason)]

    def answer(self, output: RequestOutput) -> Answer:
        """The whole of a sample."""
        *events, end = self.events(output.sample_index, output.text, output)
        assert isinstance(end, Finished)
        return Answer(parts_of(events), output, end.finish_reason)

    def _prompt_ids(self, input_processor: InputProcessor) -> list[list[int]]:
        prompt = self.request.prompt(input_processor)
        self.parser = ChatOutputParser.for_prompt(self.tokenizer, self.formats, prompt, self.request.offered_tools)
        return [input_processor.prompt_ids(prompt.token_ids)]

    def _grammar(self) -> Grammar | None:
        return answer_grammar(
            self.parser.formats,
            self.tokenizer,
            self.request.offered_tools,
            tool_use=self.request.tool_use,
            tool_name=self.request.tool_name,
            several=self.request.parallel_tool_calls,
            grammar=self.request.params.grammar,
            in_reasoning=self.parser.in_reasoning,
        )


def schema_error(request: ChatRequest, error: RequestError, compiler: GrammarCompiler) -> RequestError:
    """Return the error for tool schemas that do not compile: it names one schema, or all if only their combination fails.

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
            return RequestError(f"{tool.place} cannot be enforced on arguments ({reason}): send another schema", parameter=tool.place)
    text = "the schemas of the tools cannot be enforced together: send fewer tools, simpler schemas, or tool_choice auto without strict"
    return RequestError(f"tools: {text}", parameter="tools")


def _compile_error(grammar: Grammar, compiler: GrammarCompiler) -> RequestError | None:
    try:
        compiler.matcher(grammar)
    except RequestError as error:
        return error
    return None
