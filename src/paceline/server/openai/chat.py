"""`/v1/chat/completions`."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.outputs import RequestOutput
from paceline.parsing.events import Answer, Event, Finished, Reasoning, Step, Text
from paceline.server.answering import answered, chunk_origins, named, speculation_of
from paceline.server.dialogue.request import ChatRequest
from paceline.server.framing import data_event
from paceline.server.http_errors import HttpError
from paceline.server.json_body import JsonRoute
from paceline.server.openai.answers import DONE, head, usage_of
from paceline.server.openai.messages import ChatFields, conversation, predicted_text
from paceline.server.openai.response_format import response_grammar
from paceline.server.openai.tools import call_delta, call_fields, template_options, tool_use_of, tools_of
from paceline.server.parameters import check_prediction, request_options, sampling_params
from paceline.server.service import Service
from paceline.server.token_texts import TokenTexts

_NAMES = {"prompt": "messages", "logprobs": "top_logprobs", "template_options": "chat_template_kwargs", "adapter": "model"}


def chat_routes(service: Service) -> APIRouter:
    """The route of chats."""
    router = APIRouter(route_class=JsonRoute, tags=["openai"])
    texts = TokenTexts(service.engine.opened.maker.tokenizer)

    @router.post("/v1/chat/completions")
    async def chat_completions(fields: ChatFields, request: Request) -> Response:
        """Answer a conversation."""
        adapter = service.adapter_of(fields.model)
        fields.check_refused()
        limit = "max_completion_tokens" if fields.max_completion_tokens is not None else "max_tokens"
        form = "response_format" if fields.response_format is not None else "tools"
        with named({**_NAMES, "max_tokens": limit, "grammar": form}):
            chat = _Chat(service, fields, texts, _request(fields, service, adapter))
            return await answered(request, chat, is_streamed=fields.stream)

    return router


def _request(fields: ChatFields, service: Service, adapter: str | None) -> ChatRequest:
    messages = conversation(fields, service.settings)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs=true: send both, or none", parameter="top_logprobs", code="invalid_value")
    limit = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    check_prediction(predicted_text(fields.prediction), is_read=service.reads_predictions)
    num_top = (fields.top_logprobs or 0) if fields.logprobs else None
    tool_use, tool_name = tool_use_of(fields.tool_choice)
    tokenizer = service.engine.opened.maker.tokenizer
    return ChatRequest(
        messages=messages,
        tools=tools_of(fields.tools, service.settings),
        tool_use=tool_use,
        tool_name=tool_name,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        template_options=template_options(fields.reasoning_effort, fields.chat_template_kwargs, tokenizer),
        params=sampling_params(
            fields,
            service.settings,
            max_tokens=limit,
            n=fields.n,
            stop=fields.stop,
            grammar=response_grammar(fields.response_format, service.settings),
            logprobs=num_top,
        ),
        options=request_options(fields, predicted_text(fields.prediction), adapter=adapter),
        takes_the_rest=limit is None,
    )


@dataclass(frozen=True, slots=True)
class _Chat:
    """One request, and how it is answered."""

    service: Service
    fields: ChatFields
    texts: TokenTexts
    request: ChatRequest

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        answers = await self.service.dialogue.collect(self.request)
        outputs = [answer.output for answer in answers]
        return {
            **head(self.service, self.request.options, "chat.completion", "chatcmpl"),
            "choices": [self._choice(answer) for answer in answers],
            "usage": usage_of(outputs),
            "speculation": speculation_of(outputs, shows_origins=self.fields.shows_origins, texts=self.texts),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events: for each sample its role, what it says and its end; then the usage, if it is asked for."""
        top = head(self.service, self.request.options, "chat.completion.chunk", "chatcmpl")
        wants_usage = self.fields.stream_options is not None and bool(self.fields.stream_options.include_usage)
        if wants_usage:
            top["usage"] = None
        begun: set[int] = set()
        outputs: list[RequestOutput] = []
        async with aclosing(self.service.dialogue.stream(self.request)) as stream:
            async for step in stream:
                if step.sample not in begun:
                    begun.add(step.sample)
                    yield data_event({**top, "choices": [_delta(step.sample, {"role": "assistant", "content": ""})]})
                for fields in self._pieces(step):
                    yield data_event({**top, **fields})
                if step.chunk.output is not None:
                    outputs.append(step.chunk.output)
        if wants_usage:
            outputs.sort(key=lambda output: output.sample_index)
            end = {"usage": usage_of(outputs), "speculation": speculation_of(outputs, shows_origins=False)}
            yield data_event({**top, "choices": [], **end})
        yield DONE

    @property
    def _wants_logprobs(self) -> bool:
        return bool(self.fields.logprobs)

    def _choice(self, answer: Answer) -> dict[str, Any]:
        return {
            "index": answer.output.sample_index,
            "message": _message(answer),
            "logprobs": self.texts.chat_content(answer.output.logprobs or []) if self._wants_logprobs else None,
            "finish_reason": answer.finish_reason,
        }

    def _pieces(self, step: Step) -> Iterator[dict[str, Any]]:
        """The events of a step; the first one has what is said of its tokens, if anything is."""
        pieces = [_piece(one) for one in step.events]
        if step.chunk.token_ids and (self._wants_logprobs or self.fields.shows_origins):
            if not pieces or pieces[0]["finish_reason"] is not None:
                pieces.insert(0, _delta(step.sample, {"content": ""}))
            if self._wants_logprobs:
                pieces[0]["logprobs"] = self.texts.chat_content(step.chunk.logprobs)
        for index, piece in enumerate(pieces):
            yield {"choices": [piece], **(chunk_origins(step.chunk, self.texts) if index == 0 and self.fields.shows_origins else {})}


def _message(answer: Answer) -> dict[str, Any]:
    """The whole message; thoughts and calls are there only if the model wrote some."""
    calls = [call_fields(call) for call in answer.tool_calls]
    message = {"role": "assistant", "content": answer.text if answer.text or not calls else None, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    return {**message, "tool_calls": calls} if calls else message


def _piece(one: Event) -> dict[str, Any]:
    if isinstance(one, Finished):
        return _delta(one.sample, {}, one.finish_reason)
    if isinstance(one, Text):
        return _delta(one.sample, {"content": one.text})
    if isinstance(one, Reasoning):
        return _delta(one.sample, {"reasoning_content": one.text})
    return _delta(one.sample, {"tool_calls": [call_delta(one)]})


def _delta(sample: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": sample, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
