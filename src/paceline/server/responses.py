"""OpenAI's responses: `/v1/responses`. Nothing is stored; each request sends the whole conversation."""

import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from paceline.outputs import RequestOutput
from paceline.parsing.events import TOOL_CALLS, Answer, Event, Finished, Reasoning, Text, ToolCall, ToolCallArguments, ToolCallStart
from paceline.sampling.grammars.grammar import Grammar
from paceline.server.answer_form import schema_grammar
from paceline.server.answering import speculation_of
from paceline.server.chat import ChatRequest, Turns, checked_tools
from paceline.server.errors import check_length, http_error_of, num_chars, unsupported
from paceline.server.fields import FastList, Fields, SamplingFields, WholeNumber
from paceline.server.framing import named_event
from paceline.server.openai_chat import tool_choice
from paceline.server.parameters import request_options, sampling_params, token_limit
from paceline.server.service import Service
from paceline.server.settings import ServerSettings

_LOGPROBS = "message.output_text.logprobs"  # the other values of `include` are about tools and inputs that this server does not have
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class TextPart(Fields, at=("responses", "input[].content[]")):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class RefusalPart(Fields, at=("responses", "input[].content[]")):
    type: Literal["refusal"]
    refusal: str


Content = str | FastList[Annotated[TextPart | RefusalPart, Field(discriminator="type")]]


class MessageItem(Fields, at=("responses", "input[]")):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(Fields, at=("responses", "input[]")):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(Fields, at=("responses", "input[]")):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningItem(Fields, at=("responses", "input[]")):
    """Reasoning of an answer. Other servers send it without `content`."""

    type: Literal["reasoning"]
    summary: list[dict[str, Any]] | None = None
    content: Content | None = None


def _item_type(item: Any) -> str | None:
    return str(item.get("type") or "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]


class Format(Fields, at=("responses", "text.format")):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class TextForm(Fields, at=("responses", "text")):
    format: Format | None = None


class ReasoningFields(Fields, at=("responses", "reasoning")):
    effort: str | None = None


class FunctionTool(Fields, at=("responses", "tools[]")):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesFields(SamplingFields, at=("responses", "")):
    model: str | None = None
    input: str | FastList[Item]
    instructions: str | None = None
    max_output_tokens: WholeNumber | None = None
    stop: str | FastList[str] | None = None
    stream: bool | None = None
    tools: FastList[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextForm | None = None
    reasoning: ReasoningFields | None = None
    include: list[str] | None = None
    # an answer repeats these, and nothing else reads them
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def parameter_names(self) -> Mapping[str, str]:
        return {
            "prompt": "input",
            "messages": "input",
            "messages[": "input",
            "max_tokens": "max_output_tokens",
            "reasoning_effort": "reasoning.effort",
            "adapter": "model",
            "grammar": "tools" if self.text is None or self.text.format is None else "text.format",
        }


def responses(service: Service, fields: ResponsesFields) -> "_Response":
    """Answer a conversation. Nothing is stored."""
    adapter = service.adapter_of(fields.model)
    if _LOGPROBS in (fields.include or []):
        raise unsupported("include", f"{_LOGPROBS} is in the answers of /v1/chat/completions alone")
    limit = token_limit("max_output_tokens", fields.max_output_tokens)
    request = ChatRequest(
        messages=conversation(fields, service.settings),
        **tool_choice(fields.tool_choice, checked_tools(fields.tools, service.settings), within=""),
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        template_options=service.chat.thinking_options(fields, effort=None if fields.reasoning is None else fields.reasoning.effort),
        params=sampling_params(
            fields,
            service.settings,
            service.sampling_defaults.chat,
            max_tokens=limit,
            stop=fields.stop,
            grammar=_grammar(fields, service.settings),
        ),
        options=request_options(fields, adapter=adapter),
        fills_context=limit is None,
    )
    return _Response(service, fields, request)


def conversation(fields: ResponsesFields, settings: ServerSettings) -> list[dict[str, Any]]:
    """Return the input as chat templates take it; HttpError if it is too long."""
    turns = Turns()
    if fields.instructions is not None:
        turns.add_text("system", [fields.instructions])
    for item in [MessageItem(role="user", content=fields.input)] if isinstance(fields.input, str) else fields.input:
        if isinstance(item, MessageItem):
            turns.add_text("system" if item.role == "developer" else item.role, _texts(item.content))
        elif isinstance(item, CallItem):
            turns.add_call(item.call_id, item.name, item.arguments)
        elif isinstance(item, ResultItem):
            turns.add_result(item.call_id, None, _texts(item.output))
        elif text := "".join(_texts(item.content or [])):
            turns.add_reasoning(text)
    messages = turns.messages()
    check_length("input", num_chars(messages), settings)
    return messages


def _texts(content: Content) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part.refusal if isinstance(part, RefusalPart) else part.text for part in content]


def _grammar(fields: ResponsesFields, settings: ServerSettings) -> Grammar | None:
    form = None if fields.text is None else fields.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object" and form.json_schema is None:
        return Grammar.json_object()
    return schema_grammar("text.format", form.json_schema, settings)


@dataclass(frozen=True, slots=True)
class _Response:
    service: Service
    fields: ResponsesFields
    request: ChatRequest

    async def collect(self) -> tuple[dict[str, Any], Answer]:
        """Begin the answer's object, and generate the output."""
        head = self._head()
        (answer,) = await self.service.chat.collect(self.request)
        return head, answer

    def whole(self, collected: tuple[dict[str, Any], Answer]) -> dict[str, Any]:
        head, answer = collected
        return self._final_response(head, items_of(answer), Finished(answer.output, answer.finish_reason))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events: the response without output, each item with its pieces, then the whole response."""
        number = 0
        async with aclosing(self._objects()) as objects:
            async for fields in objects:
                yield named_event({**fields, "sequence_number": number})
                number += 1

    async def _objects(self) -> AsyncGenerator[dict[str, Any], None]:
        head, writer, has_begun = self._head(), ItemWriter(), False
        try:
            async with aclosing(self.service.chat.stream(self.request)) as stream:
                async for step in stream:
                    if not has_begun:
                        has_begun = True
                        yield {"type": "response.created", "response": head}
                        yield {"type": "response.in_progress", "response": head}
                    for event in step.events:
                        for fields in writer.objects_of(event):
                            yield fields
                        if isinstance(event, Finished):
                            response = self._final_response(head, writer.items, event)
                            yield {"type": f"response.{response['status']}", "response": response}
        except Exception as error:
            if not has_begun:
                raise
            failure = {"code": "server_error", "message": http_error_of(error).message}
            yield {"type": "response.failed", "response": {**head, "status": "failed", "error": failure, "output": writer.items}}

    def _head(self) -> dict[str, Any]:
        """The response before anything was written. Fields of the request that it repeats are repeated as they came."""
        fields, params = self.fields, self.request.params
        text = None if fields.text is None else fields.text.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": None,
            "metadata": fields.metadata or {},
            "model": self.service.name_of(self.request.options),
            "output": [],
            "parallel_tool_calls": self.request.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": fields.prompt_cache_key,
            "reasoning": {"effort": None if fields.reasoning is None else fields.reasoning.effort, "summary": None},
            "safety_identifier": fields.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **(text or {})},
            "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
            "tools": [tool.model_dump() for tool in fields.tools or []],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": fields.user,
        }

    def _final_response(self, head: dict[str, Any], items: list[dict[str, Any]], event: Finished) -> dict[str, Any]:
        is_cut = event.finish_reason == "length"
        return {
            **head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items,
            "usage": self._usage(items, event.output),
            "speculation": speculation_of([event.output], shows_origins=self.fields.shows_origins),
        }

    def _usage(self, items: list[dict[str, Any]], output: RequestOutput) -> dict[str, Any]:
        """Return token counts. Reasoning tokens are counted by encoding the reasoning text again."""
        tokenizer, usage = self.service.engine.loaded.input_processor.tokenizer, output.usage
        texts = [part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]]
        num_reasoning = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": usage.total_tokens,
        }


class ItemWriter:
    """Writes the events of one answer as items, and as the events that stream them.

    Attributes:
        items: those that are complete.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = ""

    def objects_of(self, event: Event) -> Iterator[dict[str, Any]]:
        if isinstance(event, Text):
            yield from self._begin("message", {"role": "assistant", "content": []})
            yield self._delta("response.output_text.delta", event.text, content_index=0, logprobs=[])
        elif isinstance(event, Reasoning):
            yield from self._begin("reasoning", {"summary": [], "content": []})
            yield self._delta("response.reasoning_text.delta", event.text, content_index=0)
        elif isinstance(event, ToolCallStart):
            yield from self._end("completed")
            yield from self._begin("function_call", {"call_id": event.id, "name": event.name, "arguments": ""})
        elif isinstance(event, ToolCallArguments):
            yield self._delta("response.function_call_arguments.delta", event.json)
        else:
            is_cut_call = event.finish_reason != TOOL_CALLS and self._open is not None and self._open["type"] == "function_call"
            yield from self._end("incomplete" if event.finish_reason == "length" or is_cut_call else "completed")

    def _begin(self, kind: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._end("completed")
        self._open = {"id": f"{_PREFIXES[kind]}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress", **fields}
        yield {"type": "response.output_item.added", "output_index": len(self.items), "item": self._open}
        if kind != "function_call":
            yield self._event("response.content_part.added", content_index=0, part=_part(kind, ""))

    def _delta(self, kind: str, delta: str, **fields: Any) -> dict[str, Any]:
        self._text += delta
        return self._event(kind, delta=delta, **fields)

    def _end(self, status: str) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        kind, text = self._open["type"], self._text
        if kind == "function_call":
            yield self._event("response.function_call_arguments.done", name=self._open["name"], arguments=text)
            content: dict[str, Any] = {"arguments": text}
        else:
            done = "output_text" if kind == "message" else "reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._event(f"response.{done}.done", content_index=0, text=text, **more)
            yield self._event("response.content_part.done", content_index=0, part=_part(kind, text))
            content = {"content": [_part(kind, text)]}
        item = {**self._open, "status": status, **content}
        yield {"type": "response.output_item.done", "output_index": len(self.items), "item": item}
        self.items.append(item)
        self._open, self._text = None, ""

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        return {"type": kind, "item_id": self._open["id"], "output_index": len(self.items), **fields}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def items_of(answer: Answer) -> list[dict[str, Any]]:
    writer = ItemWriter()
    for event in (*_events(answer), Finished(answer.output, answer.finish_reason)):
        deque(writer.objects_of(event), maxlen=0)
    return writer.items


def _events(answer: Answer) -> Iterator[Event]:
    for index, part in enumerate(answer.parts):
        if isinstance(part, ToolCall):
            yield ToolCallStart(index, part.id, part.name)
            yield ToolCallArguments(index, part.arguments)
        else:
            yield part
