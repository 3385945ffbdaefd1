"""From a neutral chat request to neutral events: the one way by which every API's chats are answered."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.chat_prompt import RESERVED_TEMPLATE_OPTIONS, ChatOutputParser, ChatPrompt, chat_prompt
from paceline.engine.input_processor import InputProcessor
from paceline.engine.inputs import Messages, RequestOptions
from paceline.errors import RequestError
from paceline.outputs import RequestOutput
from paceline.parsing.answer_grammar import answer_grammar
from paceline.parsing.events import TOOL_CALLS, Answer, Event, Finished, Step, parts_of
from paceline.parsing.registry import NONE, OutputFormat, OutputStream
from paceline.parsing.tool_call_grammar import arguments_schema
from paceline.parsing.tools import Tool, ToolUse
from paceline.sampling.grammars.compiler import GrammarCompiler
from paceline.sampling.grammars.grammar import Grammar
from paceline.sampling.params import SamplingParams
from paceline.server.errors import check_count, invalid
from paceline.server.fields import Fields
from paceline.server.generation import Generation, GenerationRequest
from paceline.server.settings import ServerSettings
from paceline.tokenizer.tokenizer import Tokenizer

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat request, in the same form for all APIs.

    Attributes:
        messages: as chat templates know them: `role` and `content`, of answers `tool_calls` ({"id", "type", "function": {"name",
            "arguments"}}) and `reasoning_content`, of tools' results `role: "tool"`, `tool_call_id` and `name`.
        tools: those that may be called.
        tool_use: whether they are.
        tool_name: the only one that may be called, where calls are required; None = any.
        parallel_tool_calls: whether there may be several calls in one answer.
        template_options: further variables of the chat template, such as {"enable_thinking": False}.
        add_generation_prompt: whether the prompt begins the model's turn.
        continue_final_message: whether the last message is left open, so that the answer continues its text.
        allow_special_tokens: whether control tokens that the messages spell out are control tokens.
        fills_context: whether `params.max_tokens` is replaced by the rest of the context after the prompt.
    """

    messages: Messages
    tools: Sequence[Tool] = ()
    tool_use: ToolUse = ToolUse.AUTO
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    allow_special_tokens: bool = False
    params: SamplingParams
    options: RequestOptions = field(default_factory=lambda: RequestOptions())
    fills_context: bool = False

    @property
    def offered_tools(self) -> Sequence[Tool]:
        """The tools that the prompt lists."""
        return () if self.tool_use is ToolUse.NONE else self.tools

    def prompt(self, input_processor: InputProcessor) -> ChatPrompt:
        """Return the conversation as the model reads it, with the errors of `chat_prompt`. Slow: call it in a thread."""
        return chat_prompt(
            input_processor,
            self.messages,
            tools=self.offered_tools,
            template_options=self.template_options,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            allow_special_tokens=self.allow_special_tokens,
        )


class Turns:
    """Collects a conversation. Consecutive parts of one role are one turn; an answer's reasoning, texts and calls are one turn too."""

    def __init__(self) -> None:
        self._turns: list[dict[str, Any]] = []
        self._pending: list[tuple[str, str]] = []  # ids and names of calls without a result
        self._call_names: dict[str, str] = {}

    def add_text(self, role: str, texts: Iterable[str]) -> None:
        """Append texts to the message of a role: "system", "user" or "assistant"."""
        self._turn(role)["content"] += [{"type": "text", "text": text} for text in texts]

    def add_reasoning(self, text: str) -> None:
        """Add reasoning that precedes an answer's next text."""
        turn = self._turn("assistant")
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def add_call(self, call_id: str | None, name: str, arguments: str | dict[str, Any]) -> None:
        """Add a call to an answer.

        Args:
            call_id: None = a new one.
            arguments: an object or its JSON text.
        """
        call_id = call_id or f"call_{len(self._turns)}_{len(self._pending)}"
        function = {"name": name, "arguments": arguments}
        self._turn("assistant").setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._call_names[call_id] = name
        self._pending.append((call_id, name))

    def add_result(self, call_id: str | None, name: str | None, texts: Iterable[str]) -> None:
        """Add the result of a call.

        Without an id it belongs to the next pending call of that tool, or of any. A result whose call is not in the conversation is kept
        as it is: agents cut old turns off, and most chat templates can render it.
        """
        for call in self._pending:
            if call_id == call[0] if call_id else name in (None, call[1]):
                self._pending.remove(call)
                call_id = call[0]
                break
        turn: dict[str, Any] = {"role": "tool", "tool_call_id": call_id or ""}
        if known := self._call_names.get(call_id or "", name):
            turn["name"] = known
        self._turns.append({**turn, "content": [{"type": "text", "text": text} for text in texts]})

    @property
    def last(self) -> Mapping[str, Any] | None:
        return self._turns[-1] if self._turns else None

    def drop_last(self) -> None:
        """Remove the last turn."""
        self._turns.pop()

    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation. A content of one text is that text."""
        return [{**turn, "content": plain_content(turn["content"])} for turn in self._turns]

    def _turn(self, role: str) -> dict[str, Any]:
        if not self._turns or self._turns[-1]["role"] != role:
            self._turns.append({"role": role, "content": []})
        return self._turns[-1]


def plain_content(content: list[dict[str, str]]) -> str | list[dict[str, str]]:
    """A content in its simplest form: none is an empty text, which chat templates can add to."""
    if len(content) > 1:
        return content
    return content[0]["text"] if content else ""


def checked_tools(
    given: Sequence[Any] | None, settings: ServerSettings, *, within: str = "", parameters: str = "parameters"
) -> tuple[Tool, ...]:
    """The tools of a request.

    Args:
        given: the API's objects.
        within: the field of a tool that has its name and schema; empty = the tool itself has them.
        parameters: the API's name of the schema.

    Raises:
        HttpError: they are too many or too long, or a name or a schema is wrong.
    """
    check_count("tools", len(given or ()), settings.max_tools)
    found = []
    for index, outer in enumerate(given or ()):
        place, one = (f"tools[{index}].{within}", getattr(outer, within)) if within else (f"tools[{index}]", outer)
        strict = bool(getattr(one, "strict", False))
        schema_place = f"{place}.{parameters}"
        tool = Tool(name=one.name, description=one.description, parameters=getattr(one, parameters), strict=strict, place=schema_place)
        if not _TOOL_NAME.fullmatch(tool.name):
            raise invalid(f"{place}.name", "is no name: use 1 to 128 letters, digits, dots, underscores and hyphens")
        num_chars = len(json.dumps(tool.parameters)) + len(tool.description or "")
        if num_chars > settings.max_grammar_chars:
            limit = settings.max_grammar_chars
            raise invalid(place, f"has {num_chars} characters, and may have {limit}: shorten its description and schema")
        if (tool.parameters or {}).get("type", "object") != "object":
            text = "describes no object: arguments have names; send a schema of the type object"
            raise invalid(schema_place, text)
        found.append(tool)
    return tuple(found)


def _check_tools(request: ChatRequest) -> None:
    """Raise RequestError if the tool choice names none of the tools."""
    names = [tool.name for tool in request.tools]
    if request.tool_use is ToolUse.REQUIRED and not names:
        text = "tool_choice requires a call, and there are no tools: send tools, or leave it out"
        raise RequestError(text, parameter="tool_choice")
    if request.tool_name is not None and request.tool_name not in names:
        text = f"tool_choice names the function {request.tool_name!r}, which is not among the tools: name one of them"
        raise RequestError(text, parameter="tool_choice")


class ChatService:
    """Answers chats.

    Args:
        formats: formats of calls and reasoning.
    """

    def __init__(self, generation: Generation, formats: OutputFormat) -> None:
        self._generation = generation
        self.formats = formats

    def check(self, request: ChatRequest) -> None:
        """Raise RequestError if this model cannot answer a request. `collect` and `stream` check it too; `chat_prompt` checks the rest."""
        _check_tools(request)
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
        """
        found = dict[str, Any]()
        for name, value in (given or {}).items():
            if name in RESERVED_TEMPLATE_OPTIONS or self._tokenizer.template_uses(name):
                found[name] = value
            else:
                fields.ignore("template_options", name)
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
        return await asyncio.to_thread(schema_error, request, error, self._generation.engine.loaded.input_processor.grammar_compiler)

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
        compiler.new_matcher(grammar)
    except RequestError as error:
        return error
    return None
