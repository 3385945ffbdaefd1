"""`/v1/models`, and the way from text to token ids and back as vLLM offers it."""

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from paceline.sampling.params import SamplingParams
from paceline.server.answering import named
from paceline.server.dialogue.request import ChatRequest
from paceline.server.fields import Fields
from paceline.server.http_errors import HttpError
from paceline.server.limits import check_length
from paceline.server.openai.messages import ChatFields, Message, conversation
from paceline.server.openai.tools import ToolFields, tools_of
from paceline.server.service import Service


class TokenizeFields(Fields):
    """The body of `/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[ToolFields] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeFields(Fields):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]


def model_routes(service: Service) -> APIRouter:
    """The routes that say what is served, and in which tokens."""
    router = APIRouter(tags=["openai"])
    maker = service.engine.opened.maker
    started_s = int(time.time())

    def described(adapter: str | None) -> dict[str, Any]:
        return {
            "id": adapter or service.model,
            "object": "model",
            "created": started_s,
            "owned_by": "paceline",
            "max_model_len": maker.max_context,
            "drafters": sorted(service.drafters),
            **({} if adapter is None else {"parent": service.model}),
        }

    @router.get("/v1/models")
    async def models() -> Response:
        """The model that is served, and its adapters, whose parent it is."""
        return JSONResponse({"object": "list", "data": [described(adapter) for adapter in (None, *service.engine.adapters)]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One of them by its name."""
        return JSONResponse(described(service.adapter_of(name)))

    @router.post("/tokenize")
    async def tokenize(fields: TokenizeFields) -> Response:
        """The token ids of a prompt or a conversation."""
        service.adapter_of(fields.model)
        fields.check_refused()
        with service.gate.admitted(0):
            ids = await asyncio.to_thread(_ids, fields, service)
        return JSONResponse({"count": len(ids), "max_model_len": maker.max_context, "tokens": ids})

    @router.post("/detokenize")
    async def detokenize(fields: DetokenizeFields) -> Response:
        """The text of token ids, special tokens included."""
        service.adapter_of(fields.model)
        check_length("tokens", len(fields.tokens), service.settings)
        for token_id in fields.tokens:
            if not 0 <= token_id < maker.vocab_size:
                text = f"tokens holds an id that is none of this model's, which go from 0 to {maker.vocab_size - 1}"
                raise HttpError(400, text, parameter="tokens", code="invalid_value")
        text = await asyncio.to_thread(maker.tokenizer.decode, fields.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    return router


def _ids(fields: TokenizeFields, service: Service) -> list[int]:
    maker, settings = service.engine.opened.maker, service.settings
    if (fields.prompt is None) == (fields.messages is None):
        raise HttpError(400, "send either prompt or messages", parameter="prompt", code="invalid_value")
    if fields.prompt is not None:
        check_length("prompt", len(fields.prompt), settings)
        return maker.tokenizer.encode(fields.prompt, add_special_tokens=fields.add_special_tokens is not False)
    request = ChatRequest(
        messages=conversation(ChatFields(messages=fields.messages or []), settings),
        tools=tools_of(fields.tools, settings),
        template_options=fields.chat_template_kwargs or {},
        add_generation_prompt=fields.add_generation_prompt is not False,
        params=SamplingParams(),
    )
    with named({"template_options": "chat_template_kwargs"}):
        service.dialogue.check(request)
        return request.prompt(maker).token_ids
