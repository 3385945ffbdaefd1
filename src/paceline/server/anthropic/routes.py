"""`/v1/messages`, and the count of its tokens."""

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.engine.inputs import with_plain_texts
from paceline.sampling.grammar import Grammar
from paceline.server.answering import answered, named
from paceline.server.anthropic.answers import MessageAnswer
from paceline.server.anthropic.fields import ConversationFields, MessagesFields
from paceline.server.anthropic.messages import conversation, offered_tools, tool_use
from paceline.server.dialogue.request import ChatRequest
from paceline.server.parameters import request_options, sampling_params, schema_grammar
from paceline.server.service import Service

_NAMES = {"prompt": "messages", "stop": "stop_sequences", "grammar": "output_config.format"}


def message_routes(service: Service) -> APIRouter:
    """The routes of Anthropic's dialect."""
    router = APIRouter(tags=["anthropic"])

    @router.post("/v1/messages")
    async def messages(fields: MessagesFields, request: Request) -> Response:
        """Answer a conversation."""
        service.check_model(fields.model)
        fields.check_refused()
        with named(_NAMES):
            answer = MessageAnswer(service, _chat_request(fields, service), fields.shows_origins)
            return await answered(request, answer, is_streamed=fields.stream)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(fields: ConversationFields) -> Response:
        """How many tokens a conversation has."""
        service.check_model(fields.model)
        fields.check_refused()
        with named(_NAMES), service.gate.admitted(0):
            return JSONResponse({"input_tokens": await asyncio.to_thread(_count, fields, service)})

    return router


def _chat_request(fields: MessagesFields, service: Service) -> ChatRequest:
    return ChatRequest(
        messages=conversation(fields, service.settings),
        tools=offered_tools(fields),
        **tool_use(fields),
        template_options=_template_options(fields),
        params=sampling_params(
            fields, service.settings, max_tokens=fields.max_tokens, stop=fields.stop_sequences, grammar=_grammar(fields, service)
        ),
        options=request_options(fields),
    )


def _grammar(fields: MessagesFields, service: Service) -> Grammar | None:
    wanted = fields.output_config.format if fields.output_config is not None else None
    return None if wanted is None else schema_grammar("output_config.format", wanted.json_schema, service.settings)


def _template_options(fields: ConversationFields) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if fields.thinking is not None and fields.thinking.type != "adaptive":
        options["enable_thinking"] = fields.thinking.type == "enabled"
    if fields.output_config is not None and fields.output_config.effort is not None:
        options["reasoning_effort"] = fields.output_config.effort
    return options


def _count(fields: ConversationFields, service: Service) -> int:
    """Also of a conversation that is too long to be answered."""
    maker = service.engine.opened.maker
    messages = with_plain_texts(conversation(fields, service.settings))
    tools = [tool.as_template() for tool in offered_tools(fields)]
    options = _template_options(fields)
    return len(maker.tokenizer.apply_chat_template(messages, tools=tools, options=options, max_context=maker.max_context))
