"""`/v1/chat/completions`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.outputs import RequestOutput, StreamChunk
from paceline.server.client_watch import unless_gone
from paceline.server.generation import Job
from paceline.server.http_errors import HttpError
from paceline.server.openai.answers import (
    DONE,
    TokenTexts,
    chunk_origins,
    event,
    head,
    named,
    speculation_of,
    stream_of,
    usage_of,
)
from paceline.server.openai.messages import ChatFields, conversation, predicted_text
from paceline.server.openai.parameters import request_options, sampling_params
from paceline.server.service import Service


def chat_routes(service: Service) -> APIRouter:
    """The route of chats."""
    router = APIRouter(tags=["openai"])
    texts = TokenTexts(service.engine.opened.maker.tokenizer)

    @router.post("/v1/chat/completions")
    async def chat_completions(fields: ChatFields, request: Request) -> Response:
        """Answer a conversation."""
        service.check_model(fields.model)
        fields.check_refused()
        limit = "max_completion_tokens" if fields.max_completion_tokens is not None else "max_tokens"
        with named({"prompt": "messages", "grammar": "response_format", "max_tokens": limit, "logprobs": "top_logprobs"}):
            chat = _Chat(service, fields, texts, _job(fields, service))
            return await stream_of(request, chat.events()) if fields.stream else JSONResponse(await unless_gone(request, chat.whole()))

    return router


def _job(fields: ChatFields, service: Service) -> Job:
    messages = conversation(fields, service.settings)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs=true: send both, or none", parameter="top_logprobs", code="invalid_value")
    limit = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    num_top = (fields.top_logprobs or 0) if fields.logprobs else None
    return Job(
        prompt_ids=lambda maker: [maker.chat_ids(messages)],
        params=sampling_params(fields, service.settings, max_tokens=limit, logprobs=num_top),
        options=request_options(fields, predicted_text(fields.prediction)),
        takes_the_rest=limit is None,
    )


@dataclass(frozen=True, slots=True)
class _Chat:
    """One request, and how it is answered."""

    service: Service
    fields: ChatFields
    texts: TokenTexts
    job: Job

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        outputs = await self.service.generation.collect(self.job)
        return {
            **head(self.service, "chat.completion", "chatcmpl"),
            "choices": [self._choice(output) for output in outputs],
            "usage": usage_of(outputs),
            "speculation": speculation_of(outputs, shows_origins=self._shows_origins, texts=self.texts),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events: for each sample its role, its text and its end; then the usage, if it is asked for."""
        top = head(self.service, "chat.completion.chunk", "chatcmpl")
        wants_usage = self.fields.stream_options is not None and bool(self.fields.stream_options.include_usage)
        if wants_usage:
            top["usage"] = None
        begun: set[int] = set()
        outputs: list[RequestOutput] = []
        async with aclosing(self.service.generation.stream(self.job)) as stream:
            async for _, chunk in stream:
                if chunk.sample_index not in begun:
                    begun.add(chunk.sample_index)
                    yield event({**top, "choices": [_delta(chunk, {"role": "assistant", "content": ""})]})
                if chunk.text or (chunk.token_ids and (self._wants_logprobs or self._shows_origins)):
                    shown = chunk_origins(chunk, self.texts) if self._shows_origins else {}
                    yield event({**top, "choices": [self._piece(chunk)], **shown})
                if chunk.output is not None:
                    outputs.append(chunk.output)
                    yield event({**top, "choices": [_delta(chunk, {}, chunk.output.finish_reason)]})
        if wants_usage:
            outputs.sort(key=lambda output: output.sample_index)
            end = {"usage": usage_of(outputs), "speculation": speculation_of(outputs, shows_origins=False)}
            yield event({**top, "choices": [], **end})
        yield DONE

    @property
    def _wants_logprobs(self) -> bool:
        return bool(self.fields.logprobs)

    @property
    def _shows_origins(self) -> bool:
        return self.fields.speculation is not None and self.fields.speculation.origins

    def _choice(self, output: RequestOutput) -> dict[str, Any]:
        return {
            "index": output.sample_index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self.texts.chat_content(output.logprobs or []) if self._wants_logprobs else None,
            "finish_reason": output.finish_reason,
        }

    def _piece(self, chunk: StreamChunk) -> dict[str, Any]:
        piece = _delta(chunk, {"content": chunk.text})
        return {**piece, "logprobs": self.texts.chat_content(chunk.logprobs)} if self._wants_logprobs else piece


def _delta(chunk: StreamChunk, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": chunk.sample_index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
