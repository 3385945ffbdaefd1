"""Facts about the models, and tokenization: `/v1/models`, `/props`, `/tokenize` and `/detokenize`."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from paceline import __version__
from paceline.sampling.params import SamplingParams
from paceline.server.answering import add_json_route
from paceline.server.chat import ChatRequest
from paceline.server.errors import check_count, check_length, invalid
from paceline.server.fields import FastList, Fields
from paceline.server.model_pool import ModelPool, ServedModel
from paceline.server.openai_chat import Message, ToolFields, conversation, tools_of
from paceline.server.service import Service


class TokenizeFields(Fields, at=("tokenize", "")):
    """The body of `/tokenize`: a prompt, messages, or a content."""

    model: str | None = None
    prompt: str | None = None
    messages: FastList[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: FastList[ToolFields] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None

    def parameter_names(self) -> Mapping[str, str]:
        return {"template_options": "chat_template_kwargs"}


class DetokenizeFields(Fields, at=("tokenize", "detokenize")):
    model: str | None = None
    tokens: FastList[int]


def model_routes(pool: ModelPool) -> APIRouter:
    router = APIRouter(tags=["openai"])
    started_s = int(time.time())

    def described(model: ServedModel, adapter: str | None) -> dict[str, Any]:
        found = {
            "id": adapter or model.name,
            "object": "model",
            "created": started_s,
            "owned_by": "paceline",
            "max_model_len": model.facts.max_model_len,
            "drafters": model.drafters,
            "status": {"value": model.state},
        }
        return found | ({"meta": model.facts.as_meta()} if adapter is None else {"parent": model.name})

    @router.get("/models", include_in_schema=False)
    @router.get("/v1/models")
    async def models() -> Response:
        """List the served models, and their adapters with the model as parent."""
        found = [described(model, adapter) for model in pool.models for adapter in (None, *model.adapters)]
        return JSONResponse({"object": "list", "data": found})

    @router.get("/models/{name:path}", include_in_schema=False)
    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """Return one served model or adapter by its name."""
        found = pool.find(name)
        return JSONResponse(described(found, found.adapter_of(name)))

    @router.get("/props")
    async def props(model: str | None = None) -> Response:
        """Facts about a model that llama.cpp's clients look for."""
        return JSONResponse(await asyncio.to_thread(_props, pool.find(model)))

    add_json_route(router, pool, "/tokenize", TokenizeFields, tokenize)
    add_json_route(router, pool, "/detokenize", DetokenizeFields, detokenize)
    return router


def _props(model: ServedModel) -> dict[str, Any]:
    service = model.service
    return {
        "default_generation_settings": {"n_ctx": model.facts.max_model_len},
        "total_slots": model.engine.max_num_seqs if service is None else service.engine.loaded.engine.scheduler.limits.max_num_seqs,
        "model_alias": model.name,
        "model_path": model.name,
        "chat_template": model.template()[0],
        "modalities": {"vision": False, "audio": False},
        "build_info": f"paceline-{__version__}" if service is None else service.fingerprint,
    }


def tokenize(service: Service, fields: TokenizeFields) -> dict[str, Any]:
    """The token ids of a prompt or a conversation."""
    service.adapter_of(fields.model)
    ids = _ids(service, fields)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": service.engine.loaded.input_processor.max_model_len, "tokens": ids}
    if fields.return_token_strs:
        found["token_strs"] = [service.texts.text_of(token_id) for token_id in ids]
    if fields.with_pieces:
        found["tokens"] = [{"id": token_id, "piece": service.texts.piece_of(token_id)} for token_id in ids]
    return found


def _ids(service: Service, fields: TokenizeFields) -> list[int]:
    input_processor, settings = service.engine.loaded.input_processor, service.settings
    given = [name for name in ("prompt", "messages", "content") if getattr(fields, name) is not None]
    if len(given) != 1:
        raise invalid(given[0] if given else "prompt", "must be sent alone: send one of prompt, messages and content")
    if fields.messages is None:
        text = fields.content if fields.prompt is None else fields.prompt
        assert text is not None
        check_length(given[0], len(text), settings)
        adds_special = bool(fields.add_special) if fields.prompt is None else fields.add_special_tokens is not False
        if fields.parse_special is False:
            return (input_processor.tokenizer.encode("") if adds_special else []) + input_processor.tokenizer.encode_as_text(text)
        return input_processor.tokenizer.encode(text, add_special_tokens=adds_special)
    return service.chat.prompt_ids(
        ChatRequest(
            messages=conversation(fields.messages, settings),
            tools=tools_of(fields.tools, settings),
            template_options=service.chat.template_options(fields, fields.chat_template_kwargs),
            add_generation_prompt=fields.add_generation_prompt is not False,
            continue_final_message=bool(fields.continue_final_message) and bool(fields.messages),
            params=SamplingParams(),
        )
    )


def detokenize(service: Service, fields: DetokenizeFields) -> dict[str, Any]:
    """The text of token ids, special tokens included."""
    service.adapter_of(fields.model)
    input_processor = service.engine.loaded.input_processor
    check_count("tokens", len(fields.tokens), service.settings.max_prompt_chars)
    for token_id in fields.tokens:
        if not 0 <= token_id < input_processor.vocab_size:
            raise invalid("tokens", f"holds an id that is none of this model's, which go from 0 to {input_processor.vocab_size - 1}")
    text = input_processor.tokenizer.decode(fields.tokens, skip_special_tokens=False)
    return {"prompt": text, "content": text}
