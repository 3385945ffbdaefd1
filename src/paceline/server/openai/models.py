"""`/v1/models`, and the way from text to token ids and back as vLLM offers it."""

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from paceline.engine.inputs import with_plain_texts
from paceline.errors import RequestError
from paceline.server.http_errors import HttpError
from paceline.server.openai.fields import Fields
from paceline.server.openai.messages import ChatFields, Message, check_length, conversation
from paceline.server.service import Service


class TokenizeFields(Fields):
    """The body of `/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeFields(Fields):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]


def model_routes(service: Service) -> APIRouter:
    """The routes that say what is served, and in which tokens."""
    router = APIRouter(tags=["openai"])
    maker = service.engine.opened.maker
    described = {
        "id": service.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "paceline",
        "max_model_len": maker.max_context,
        "drafters": sorted(service.engine.opened.engine.speculator.drafters),
    }

    @router.get("/v1/models")
    async def models() -> Response:
        """The one model that is served."""
        return JSONResponse({"object": "list", "data": [described]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The same by its name."""
        service.check_model(name)
        return JSONResponse(described)

    @router.post("/tokenize")
    async def tokenize(fields: TokenizeFields) -> Response:
        """The token ids of a prompt or a conversation."""
        service.check_model(fields.model)
        with service.gate.admitted(0):
            ids = await asyncio.to_thread(_ids, fields, service)
        return JSONResponse({"count": len(ids), "max_model_len": maker.max_context, "tokens": ids})

    @router.post("/detokenize")
    async def detokenize(fields: DetokenizeFields) -> Response:
        """The text of token ids, special tokens included."""
        service.check_model(fields.model)
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
    turns: list[dict[str, Any]] = conversation(ChatFields(messages=fields.messages or []), settings)
    try:
        return maker.tokenizer.apply_chat_template(
            with_plain_texts(turns), add_generation_prompt=fields.add_generation_prompt is not False, max_context=maker.max_context
        )
    except RequestError as error:
        raise RequestError(str(error), parameter="messages", code=error.code) from error
