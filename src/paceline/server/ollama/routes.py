"""`/api/chat` and `/api/generate`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.parsing.events import Answer, Event, Finished, Step, Text
from paceline.sampling.grammar import Grammar
from paceline.sampling.params import MAX_INT, SamplingParams
from paceline.server.answering import answered, named
from paceline.server.dialogue.request import ChatRequest
from paceline.server.fields import SamplingFields
from paceline.server.generation import Generation, GenerationRequest
from paceline.server.http_errors import HttpError
from paceline.server.json_body import JsonRoute
from paceline.server.limits import check_length
from paceline.server.ollama.answers import OllamaAnswer, Talk, head
from paceline.server.ollama.fields import ChatFields, GenerateFields, Options, RequestFields
from paceline.server.ollama.messages import conversation, offered_tools
from paceline.server.ollama.models import adapter_of
from paceline.server.parameters import request_options, sampling_params, schema_grammar
from paceline.server.service import Service
from paceline.server.token_texts import TokenTexts

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # Ollama's
_SAME_NAMES = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty")
_NAMES = {
    **{name: f"options.{name}" for name in (*_SAME_NAMES, "stop")},
    "repetition_penalty": "options.repeat_penalty",
    "max_tokens": "options.num_predict",
    "grammar": "format",
    "adapter": "model",
    "logprobs": "top_logprobs",
    "thinking": "think",
    "reasoning_effort": "think",
}


def ollama_routes(service: Service) -> APIRouter:
    """The routes of Ollama's dialect that write text."""
    router = APIRouter(route_class=JsonRoute, tags=["ollama"])
    texts = TokenTexts(service.engine.opened.maker.tokenizer)

    @router.post("/api/chat")
    async def chat(fields: ChatFields, request: Request) -> Response:
        """Answer a conversation."""
        adapter = adapter_of(service, fields.model)
        fields.check_refused()
        model = adapter or service.model
        if not fields.messages:
            return _loaded(model, {"message": {"role": "assistant", "content": ""}})
        with named({**_NAMES, "prompt": "messages", "messages[": "messages"}):
            talk = _Chat(service, _chat_request(fields, service, adapter))
            answer = OllamaAnswer(model, fields, texts, talk, is_chat=True)
            return await answered(request, answer, is_streamed=fields.stream is not False)

    @router.post("/api/generate")
    async def generate(fields: GenerateFields, request: Request) -> Response:
        """Answer a prompt, or go on with a raw one."""
        adapter = adapter_of(service, fields.model)
        fields.check_refused()
        model = adapter or service.model
        if not fields.prompt:
            return _loaded(model, {"response": ""})
        with named({**_NAMES, "messages": "prompt", "messages[": "prompt"}):
            talk = _prompt_talk(fields, fields.prompt, service, adapter)
            answer = OllamaAnswer(model, fields, texts, talk, is_chat=False)
            return await answered(request, answer, is_streamed=fields.stream is not False)

    return router


def _loaded(model: str, fields: dict[str, Any]) -> Response:
    """The answer to who asks for nothing but that the model is there."""
    return JSONResponse({**head(model), **fields, "done": True, "done_reason": "load"})


def _chat_request(fields: ChatFields, service: Service, adapter: str | None) -> ChatRequest:
    return ChatRequest(
        messages=conversation(fields, service.settings),
        tools=offered_tools(fields, service.settings),
        template_options=_template_options(fields, service),
        params=_params(fields, service),
        options=request_options(_sampling(fields), adapter=adapter),
        takes_the_rest=_limit(fields) is None,
    )


def _prompt_talk(fields: GenerateFields, prompt: str, service: Service, adapter: str | None) -> Talk:
    check_length("prompt", len(prompt) + len(fields.system or ""), service.settings)
    params, takes_the_rest = _params(fields, service), _limit(fields) is None
    options = request_options(_sampling(fields), adapter=adapter)
    if fields.raw:
        job = GenerationRequest(
            prompt_ids=lambda maker: [maker.prompt_ids(prompt)], params=params, options=options, takes_the_rest=takes_the_rest
        )
        return _Raw(service.generation, job)
    messages = [{"role": "system", "content": fields.system}] if fields.system else []
    request = ChatRequest(
        messages=[*messages, {"role": "user", "content": prompt}],
        template_options=_template_options(fields, service),
        params=params,
        options=options,
        takes_the_rest=takes_the_rest,
    )
    return _Chat(service, request)


@dataclass(frozen=True, slots=True)
class _Chat:
    """A conversation."""

    service: Service
    request: ChatRequest

    async def collect(self) -> list[Answer]:
        return await self.service.dialogue.collect(self.request)

    def stream(self) -> AsyncGenerator[Step, None]:
        return self.service.dialogue.stream(self.request)


@dataclass(frozen=True, slots=True)
class _Raw:
    """A text that goes on, without a chat template: all that is written is text."""

    generation: Generation
    job: GenerationRequest

    async def collect(self) -> list[Answer]:
        return [Answer((Text(0, output.text),), output, output.finish_reason) for output in await self.generation.collect(self.job)]

    async def stream(self) -> AsyncGenerator[Step, None]:
        async with aclosing(self.generation.stream(self.job)) as stream:
            async for _, chunk in stream:
                events: list[Event] = [Text(0, chunk.text)] if chunk.text else []
                if chunk.output is not None:
                    events.append(Finished(0, chunk.output, chunk.output.finish_reason))
                yield Step(0, chunk, tuple(events))


def _sampling(fields: RequestFields) -> SamplingFields:
    options = fields.options or Options()
    given = {name: value for name in _SAME_NAMES if (value := getattr(options, name)) is not None}
    if given.get("seed") == -1:
        del given["seed"]  # a fresh one
    return SamplingFields(**{**_DEFAULTS, **given}, repetition_penalty=options.repeat_penalty, speculation=fields.speculation)


def _params(fields: RequestFields, service: Service) -> SamplingParams:
    options, longest = fields.options or Options(), service.engine.opened.maker.max_context
    if options.num_ctx is not None and not 1 <= options.num_ctx <= longest:
        limits = f"it must be in [1, {longest}], the context there is; --max-context serves another"
        text = f"options.num_ctx: {options.num_ctx} is out of range; {limits}"
        raise HttpError(400, text, parameter="options.num_ctx", code="invalid_value")
    return sampling_params(
        _sampling(fields),
        service.settings,
        max_tokens=_limit(fields),
        stop=options.stop,
        grammar=_grammar(fields, service),
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
    )


def _limit(fields: RequestFields) -> int | None:
    """Tokens at most; None = as many as fit.

    Raises:
        HttpError: it is out of range.
    """
    limit = None if fields.options is None else fields.options.num_predict
    if limit is None or limit in (-1, -2):
        return None
    if not 1 <= limit <= MAX_INT:
        name = "options.num_predict"
        text = f"{name}: {limit} is out of range; it must be in [1, {MAX_INT}], or -1 or -2 for what the context holds"
        raise HttpError(400, text, parameter=name, code="invalid_value")
    return limit


def _grammar(fields: RequestFields, service: Service) -> Grammar | None:
    if not fields.format:
        return None
    return Grammar.json_object() if fields.format == "json" else schema_grammar("format", fields.format, service.settings)


def _template_options(fields: RequestFields, service: Service) -> dict[str, Any]:
    if isinstance(fields.think, str):
        return service.dialogue.thinking_options(effort=fields.think)
    return service.dialogue.thinking_options(thinks=fields.think)
