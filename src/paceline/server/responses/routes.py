"""`/v1/responses`."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.sampling.grammar import Grammar
from paceline.server.answering import answered, named
from paceline.server.dialogue.request import ChatRequest
from paceline.server.json_body import JsonRoute
from paceline.server.parameters import request_options, sampling_params, schema_grammar
from paceline.server.responses.answers import ResponseAnswer
from paceline.server.responses.fields import ResponsesFields
from paceline.server.responses.items import conversation, offered_tools, tool_use
from paceline.server.service import Service

_NAMES = {
    "prompt": "input",
    "messages": "input",
    "messages[": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "adapter": "model",
}


def response_routes(service: Service) -> APIRouter:
    """The route of responses."""
    router = APIRouter(route_class=JsonRoute, tags=["openai"])

    @router.post("/v1/responses")
    async def responses(fields: ResponsesFields, request: Request) -> Response:
        """Answer a conversation, of which nothing is stored."""
        adapter = service.adapter_of(fields.model)
        fields.check_refused()
        form = "tools" if fields.text is None or fields.text.format is None else "text.format"
        with named({**_NAMES, "grammar": form}):
            answer = ResponseAnswer(service, fields, _chat_request(fields, service, adapter))
            return await answered(request, answer, is_streamed=fields.stream)

    return router


def _chat_request(fields: ResponsesFields, service: Service, adapter: str | None) -> ChatRequest:
    return ChatRequest(
        messages=conversation(fields, service.settings),
        tools=offered_tools(fields, service.settings),
        **tool_use(fields),
        template_options=service.dialogue.thinking_options(effort=None if fields.reasoning is None else fields.reasoning.effort),
        params=sampling_params(
            fields, service.settings, max_tokens=fields.max_output_tokens, stop=fields.stop, grammar=_grammar(fields, service)
        ),
        options=request_options(fields, adapter=adapter),
        takes_the_rest=fields.max_output_tokens is None,
    )


def _grammar(fields: ResponsesFields, service: Service) -> Grammar | None:
    wanted = None if fields.text is None else fields.text.format
    if wanted is None or wanted.type == "text":
        return None
    return Grammar.json_object() if wanted.type == "json_object" else schema_grammar("text.format", wanted.json_schema, service.settings)
