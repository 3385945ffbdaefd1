"""Ollama's API: `/api/chat`, `/api/generate`, and what its clients request about models."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.outputs import RequestOutput
from paceline.parsing.events import Answer, Event, Finished, Reasoning, Step, Text, ToolCall, ToolCallArguments, ToolCallStart
from paceline.sampling.grammars.grammar import Grammar
from paceline.sampling.logprobs import TokenLogprobs
from paceline.server.answer_form import schema_grammar
from paceline.server.answering import add_answer_route, named, read_request, request_schema, speculation_of
from paceline.server.chat import ChatRequest, Turns, checked_tools
from paceline.server.errors import check_length, invalid, num_chars, shown
from paceline.server.fields import FastList, Fields, SamplingFields, SpeculationFields, WholeNumber, report_ignored
from paceline.server.framing import line
from paceline.server.generation import GenerationRequest
from paceline.server.model_pool import ModelPool, ServedModel
from paceline.server.parameters import num_top_logprobs, request_options, sampling_params, token_limit
from paceline.server.service import Service
from paceline.server.settings import ServerSettings, seconds_of

EMPTY_CHAT, EMPTY_TEXT = {"message": {"role": "assistant", "content": ""}}, {"response": ""}
NEVER = "9999-12-31T23:59:59Z"
MAX_KEEP_S = 1e9
"""Seconds that a model stays loaded, beyond which a date means never."""
API_VERSION = "0.12.11"  # the release whose API this is; clients compare it with the one that brought a feature
DOCUMENTED = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's defaults."""
_SAME_NAMES = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty")


class CalledFunction(Fields, at=("ollama", "messages[].tool_calls[].function")):
    name: str
    arguments: dict[str, Any] | str | None = None


class CallFields(Fields, at=("ollama", "messages[].tool_calls[]")):
    id: str | None = None
    function: CalledFunction


class Message(Fields, at=("ollama", "messages[]")):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: FastList[CallFields] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class FunctionFields(Fields, at=("ollama", "tools[].function")):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolFields(Fields, at=("ollama", "tools[]")):
    """A tool. All tools are functions."""

    type: Literal["function"] | None = None
    function: FunctionFields


class Options(Fields, at=("ollama", "options")):
    """How tokens are chosen. A `num_ctx` other than the model's context is ignored."""

    num_predict: WholeNumber | None = None
    num_ctx: WholeNumber | None = None
    temperature: float | None = None
    top_k: WholeNumber | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: WholeNumber | None = None
    stop: str | FastList[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class RequestFields(Fields, at=("ollama", "")):
    model: str
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: WholeNumber | None = None
    speculation: SpeculationFields | None = None

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False

    @property
    def keep_s(self) -> float | None:
        """Seconds of `keep_alive`; infinite if it is negative."""
        try:
            return None if self.keep_alive is None else seconds_of(self.keep_alive)
        except ValueError:
            text = f'is {shown(self.keep_alive)}: send seconds or a time such as "5m", 0 to unload the model, -1 to keep it'
            raise invalid("keep_alive", text) from None

    def parameter_names(self) -> Mapping[str, str]:
        prompt = "prompt" if isinstance(self, GenerateFields) else "messages"
        return {
            **{name: f"options.{name}" for name in (*_SAME_NAMES, "stop")},
            "repetition_penalty": "options.repeat_penalty",
            "max_tokens": "options.num_predict",
            "grammar": "format",
            "adapter": "model",
            "logprobs": "top_logprobs",
            "thinking": "think",
            "reasoning_effort": "think",
            "prompt": prompt,
            "messages": prompt,
            "messages[": prompt,
        }


class ChatFields(RequestFields):
    """The body of `/api/chat`."""

    messages: FastList[Message] | None = None
    tools: FastList[ToolFields] | None = None


class GenerateFields(RequestFields):
    """The body of `/api/generate`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class ShowFields(Fields, at=("ollama", "show")):
    model: str | None = None
    name: str | None = None


def ollama_routes(pool: ModelPool) -> APIRouter:
    router = APIRouter(tags=["ollama"])
    started = _now()

    add_answer_route(router, pool, "/api/chat", ChatFields, chat, _unloaded)
    add_answer_route(router, pool, "/api/generate", GenerateFields, generate, _unloaded)

    @router.get("/api/version")
    async def version() -> Response:
        """The version of Ollama whose API this is."""
        return JSONResponse({"version": API_VERSION})

    @router.get("/api/tags")
    async def tags() -> Response:
        """List the served models and their adapters."""
        return JSONResponse({"models": [{**one, "modified_at": started} for model in pool.models for one in _listed(model)]})

    @router.get("/api/ps")
    async def running() -> Response:
        """List the loaded models, and when they will be unloaded if no request comes."""
        found = [{**one, **_loaded_facts(model)} for model in pool.models if model.service is not None for one in _listed(model)]
        return JSONResponse({"models": found})

    @router.post("/api/show", openapi_extra=request_schema(ShowFields))
    async def show(request: Request) -> Response:
        """Facts about a model."""
        fields = await read_request(request, pool, ShowFields)
        with named(fields.parameter_names()):
            found = await asyncio.to_thread(_shown, fields, pool)
        return JSONResponse({**found, "modified_at": started}, headers=report_ignored(fields.ignored, pool.logged_fields))

    return router


def chat(service: Service, fields: ChatFields) -> "_OllamaAnswer | Response":
    """Answer a conversation."""
    adapter = service.adapter_of(fields.model)
    if not fields.messages:
        return _loaded(adapter or service.model, EMPTY_CHAT)
    request = ChatRequest(
        messages=conversation(fields, service.settings),
        tools=checked_tools(fields.tools, service.settings, within="function"),
        template_options=_template_options(fields, service),
        **_generation(fields, service, adapter),
    )
    return _OllamaAnswer(service, adapter or service.model, fields, request, is_chat=True)


def generate(service: Service, fields: GenerateFields) -> "_OllamaAnswer | Response":
    """Answer a prompt, or continue a raw one."""
    adapter = service.adapter_of(fields.model)
    prompt, system = fields.prompt, fields.system
    if not prompt:
        return _loaded(adapter or service.model, EMPTY_TEXT)
    if fields.raw and system:
        raise invalid("system", "is no part of a raw prompt: write it into the prompt")
    check_length("prompt", len(prompt) + len(system or ""), service.settings)
    generation = _generation(fields, service, adapter)
    request: ChatRequest | GenerationRequest
    if _is_raw(fields, service):
        request = GenerationRequest(prompt_ids=lambda input_processor: [input_processor.prompt_ids(prompt)], **generation)
    else:
        messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}]
        request = ChatRequest(messages=messages, template_options=_template_options(fields, service), **generation)
    return _OllamaAnswer(service, adapter or service.model, fields, request, is_chat=False)


def _is_raw(fields: GenerateFields, service: Service) -> bool:
    """Return whether a prompt is continued as it is. Ollama also does so with models that have no chat template."""
    return bool(fields.raw) or not (fields.system or service.engine.loaded.input_processor.tokenizer.has_chat_template)


def _loaded(model: str, fields: Mapping[str, Any], reason: str = "load") -> Response:
    """The answer to a request without a prompt, which only loads or unloads the model."""
    return JSONResponse({**_head(model), **fields, "done": True, "done_reason": reason})


def _unloaded(pool: ModelPool, fields: "ChatFields | GenerateFields") -> Response | None:
    """The answer to a request that only unloads its model; None = it does more."""
    is_chat = isinstance(fields, ChatFields)
    if (fields.messages if isinstance(fields, ChatFields) else fields.prompt) or fields.keep_s != 0 or not pool.unloads:
        return None
    model = pool.find(fields.model)
    pool.unload_soon(model)
    return _loaded(model.name, EMPTY_CHAT if is_chat else EMPTY_TEXT, "unload")


def conversation(fields: ChatFields, settings: ServerSettings) -> list[dict[str, Any]]:
    """Return the messages as chat templates take them; HttpError if they are too long."""
    turns = Turns()
    for message in fields.messages or []:
        if message.role == "tool":
            turns.add_result(message.tool_call_id, message.tool_name, [message.content or ""])
            continue
        if message.thinking:
            turns.add_reasoning(message.thinking)
        if message.content or not message.tool_calls:
            turns.add_text(message.role, [message.content or ""])
        for call in message.tool_calls or []:
            turns.add_call(call.id, call.function.name, call.function.arguments or {})
    messages = turns.messages()
    check_length("messages", num_chars(messages), settings)
    return messages


def _sampling(fields: RequestFields) -> SamplingFields:
    options = fields.options or Options()
    given = {name: value for name in _SAME_NAMES if (value := getattr(options, name)) is not None}
    if given.get("seed") == -1:
        del given["seed"]  # a fresh one
    return SamplingFields(**given, repetition_penalty=options.repeat_penalty, speculation=fields.speculation)


def _generation(fields: RequestFields, service: Service, adapter: str | None) -> dict[str, Any]:
    """Fields that a `ChatRequest` and a `GenerationRequest` share."""
    options, longest = fields.options or Options(), service.engine.loaded.input_processor.max_model_len
    if options.num_ctx not in (None, longest):
        fields.ignore("options.num_ctx")  # Ollama's clients send their own default
    limit, sampling = token_limit("options.num_predict", options.num_predict, unlimited=(0, -1, -2)), _sampling(fields)
    is_raw = isinstance(fields, GenerateFields) and _is_raw(fields, service)
    grammar = Grammar.json_object() if fields.format == "json" else None
    if isinstance(fields.format, dict) and fields.format:
        grammar = schema_grammar("format", fields.format, service.settings)
    params = sampling_params(
        sampling,
        service.settings,
        service.sampling_defaults.completion_defaults(DOCUMENTED) if is_raw else service.sampling_defaults.chat,
        max_tokens=limit,
        stop=options.stop,
        grammar=grammar,
        logprobs=num_top_logprobs(logprobs=fields.logprobs, top_logprobs=fields.top_logprobs),
    )
    return {"params": params, "options": request_options(sampling, adapter=adapter), "fills_context": limit is None}


def _template_options(fields: RequestFields, service: Service) -> dict[str, Any]:
    if isinstance(fields.think, str):
        return service.chat.thinking_options(fields, effort=fields.think)
    return service.chat.thinking_options(fields, thinks=fields.think)


@dataclass(frozen=True, slots=True)
class _OllamaAnswer:
    """Generates one answer and writes it as Ollama does.

    Attributes:
        model: its name in the answer.
        request: a conversation, or a raw prompt, whose output is all text.
        is_chat: whether texts are in a message, or in `response`.
    """

    service: Service
    model: str
    fields: RequestFields
    request: ChatRequest | GenerationRequest
    is_chat: bool

    async def collect(self) -> Answer:
        if isinstance(self.request, ChatRequest):
            (answer,) = await self.service.chat.collect(self.request)
            return answer
        (output,) = await self.service.generation.collect(self.request)
        return Answer((Text(output.text),), output, output.finish_reason)

    def whole(self, answer: Answer) -> dict[str, Any]:
        more = {"thinking": answer.reasoning} if answer.reasoning else {}
        calls = [found for call in answer.tool_calls if (found := _call(call)) is not None]
        whole = self._object(answer.text, **more, **({"tool_calls": calls} if calls else {}))
        return {**whole, **self._logprobs(answer.output.logprobs or []), **self._ending(answer.output, answer.finish_reason)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as lines: texts piece by piece, calls once they are complete, then its end."""
        calls = _CallCollector()
        steps = self.service.chat.stream(self.request) if isinstance(self.request, ChatRequest) else self._raw_steps(self.request)
        async with aclosing(steps) as stream:
            async for step in stream:
                for fields in self._lines(step, calls):
                    yield line(fields)

    async def _raw_steps(self, request: GenerationRequest) -> AsyncGenerator[Step, None]:
        async with aclosing(self.service.generation.stream(request)) as stream:
            async for _, chunk in stream:
                events: list[Event] = [Text(chunk.text)] if chunk.text else []
                if chunk.output is not None:
                    events.append(Finished(chunk.output, chunk.output.finish_reason))
                yield Step(chunk, tuple(events))

    def _lines(self, step: Step, calls: "_CallCollector") -> Iterator[dict[str, Any]]:
        """The objects of a step. The first one has the log-probabilities of its tokens."""
        more = self._logprobs(step.chunk.logprobs)
        for event in step.events:
            if (call := calls.completed(event)) is not None:
                yield {**self._object("", tool_calls=[call]), "done": False, **more}
                more = {}
            if isinstance(event, Text | Reasoning):
                is_text = isinstance(event, Text)
                yield {**(self._object(event.text) if is_text else self._object("", thinking=event.text)), "done": False, **more}
                more = {}
            elif isinstance(event, Finished):
                yield {**self._object(""), **more, **self._ending(event.output, event.finish_reason)}
                more = {}
        if more:
            yield {**self._object(""), "done": False, **more}

    def _object(self, text: str, **more: Any) -> dict[str, Any]:
        if self.is_chat:
            return {**_head(self.model), "message": {"role": "assistant", "content": text, **more}}
        return {**_head(self.model), "response": text, **more}

    def _ending(self, output: RequestOutput, finish_reason: str) -> dict[str, Any]:
        timing, usage, options = output.timing, output.usage, self.fields.speculation
        return {
            "done": True,
            "done_reason": "length" if finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(self.fields.load_s + timing.total_s),
            "load_duration": _nanoseconds(self.fields.load_s),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(timing.prompt_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(timing.decode_s),
            "speculation": speculation_of([output], shows_origins=options is not None and options.origins),
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        if not self.fields.logprobs or not logprobs:
            return {}
        return {"logprobs": self.service.texts.chat_content(logprobs)["content"]}


class _CallCollector:
    """Collects the pieces of calls until each is complete."""

    def __init__(self) -> None:
        self._open: ToolCall | None = None

    def completed(self, event: Event) -> dict[str, Any] | None:
        """The call that an event ends, if it ends one that is whole."""
        if isinstance(event, ToolCallArguments):
            assert self._open is not None
            self._open = replace(self._open, arguments=self._open.arguments + event.json)
            return None
        ended, self._open = self._open, ToolCall(event.id, event.name) if isinstance(event, ToolCallStart) else None
        return None if ended is None else _call(ended)


def _head(model: str) -> dict[str, Any]:
    """The fields that every object begins with."""
    return {"model": model, "created_at": _now()}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _call(call: ToolCall) -> dict[str, Any] | None:
    """A call; None where the answer broke off within it. `done_reason` is then length."""
    found = call.parsed()
    return None if found is None else {"id": call.id, "function": {"name": call.name, "arguments": found}}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _shown(fields: ShowFields, pool: ModelPool) -> dict[str, Any]:
    name = fields.model or fields.name
    model = pool.find(name)
    adapter, facts, (template, variables) = model.adapter_of(name), model.facts, model.template()
    family, config = facts.config.family, facts.config
    capabilities = {"tools": "tools", "enable_thinking": "thinking"}
    return {
        "details": facts.as_details("" if adapter is None else model.name),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": facts.num_parameters,
            f"{family}.block_count": config.num_layers,
            f"{family}.context_length": facts.max_model_len,
            f"{family}.embedding_length": config.hidden_size,
        },
        "capabilities": ["completion", *(capabilities[variable] for variable in variables)],
        "parameters": "",
        "template": template,
    }


def _listed(model: ServedModel) -> list[dict[str, Any]]:
    """Entries of a list of models: the model and its adapters."""
    found = []
    for adapter in (None, *model.adapters):
        name, facts = adapter or model.name, model.facts
        details = facts.as_details("" if adapter is None else model.name)
        found.append({"name": name, "model": name, "size": facts.num_bytes, "digest": facts.digest_of(name), "details": details})
    return found


def _loaded_facts(model: ServedModel) -> dict[str, Any]:
    """Return the fields that only the list of loaded models has: memory, expiry time and context length."""
    left_s = model.keep_s
    if model.unload_at_s is not None:
        left_s = model.unload_at_s - asyncio.get_running_loop().time()
    expires = NEVER if left_s > MAX_KEEP_S else (datetime.now(UTC) + timedelta(seconds=left_s)).isoformat().replace("+00:00", "Z")
    return {"size_vram": 0, "expires_at": expires, "context_length": model.facts.max_model_len}
