"""`/v1/messages`, and the count of its tokens."""

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.sampling.grammar import Grammar
from paceline.sampling.params import SamplingParams
from paceline.server.answering import answered, named
from paceline.server.anthropic.answers import MessageAnswer
from paceline.server.anthropic.fields import ConversationFields, MessagesFields
from paceline.server.anthropic.messages import conversation, offered_tools, tool_use
from paceline.server.dialogue.request import ChatRequest
from paceline.server.parameters import request_options, sampling_params, schema_grammar
from paceline.server.service import Service

_NAMES = {
    "prompt": "messages",
    "messages[": "messages",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "adapter": "model",
}


def message_routes(service: Service) -> APIRouter:
    """The routes of Anthropic's dialect."""
    router = APIRouter(tags=["anthropic"])

    @router.post("/v1/messages")
    async def messages(fields: MessagesFields, request: Request) -> Response:
        """Answer a conversation."""
        adapter = service.adapter_of(fields.model)
        fields.check_refused()
        form = "tools" if fields.output_config is None or fields.output_config.format is None else "output_config.format"
        with named({**_NAMES, "grammar": form}):
            answer = MessageAnswer(service, _chat_request(fields, service, _params(fields, service), adapter), fields.shows_origins)
            return await answered(request, answer, is_streamed=fields.stream)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(fields: ConversationFields) -> Response:
        """How many tokens a conversation has."""
        service.adapter_of(fields.model)
        fields.check_refused()
        with named(_NAMES), service.gate.admitted(0):
            return JSONResponse({"input_tokens": await asyncio.to_thread(_count, fields, service)})

    return router


def _params(fields: MessagesFields, service: Service) -> SamplingParams:
    grammar = _grammar(fields, service)
    return sampling_params(fields, service.settings, max_tokens=fields.max_tokens, stop=fields.stop_sequences, grammar=grammar)


def _chat_request(fields: ConversationFields, service: Service, params: SamplingParams, adapter: str | None = None) -> ChatRequest:
    return ChatRequest(
        messages=conversation(fields, service.settings),
        tools=offered_tools(fields, service.settings),
        **tool_use(fields),
        template_options=_template_options(fields, service),
        params=params,
        options=request_options(fields, adapter=adapter),
    )


def _grammar(fields: MessagesFields, service: Service) -> Grammar | None:
    wanted = fields.output_config.format if fields.output_config is not None else None
    return None if wanted is None else schema_grammar("output_config.format", wanted.json_schema, service.settings)


def _template_options(fields: ConversationFields, service: Service) -> dict[str, Any]:
    """How to think; "adaptive" and the effort "high" are what Anthropic's models do untold."""
    thinks = None if fields.thinking is None or fields.thinking.type == "adaptive" else fields.thinking.type == "enabled"
    effort = None if fields.output_config is None else fields.output_config.effort
    if effort == "high":
        effort = None
    return service.dialogue.thinking_options(thinks=thinks, effort=effort if thinks is not False else None)


def _count(fields: ConversationFields, service: Service) -> int:
    """Also of a conversation that is too long to be answered."""
    request = _chat_request(fields, service, SamplingParams())
    service.dialogue.check(request)
    return len(request.prompt(service.engine.opened.maker).token_ids)
