"""Anthropic's messages: `/v1/messages`, and the count of a conversation's tokens."""

import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.outputs import RequestOutput, Usage
from paceline.parsing.events import Answer, Event, Finished, Reasoning, Text, ToolCall, ToolCallArguments, ToolCallStart
from paceline.parsing.tools import ToolUse
from paceline.sampling.params import SamplingParams
from paceline.server.answer_form import schema_grammar
from paceline.server.answering import speculation_of
from paceline.server.chat import ChatRequest, Turns, checked_tools
from paceline.server.errors import check_length, invalid, num_chars, unsupported
from paceline.server.fields import FastList, Fields, SamplingFields, WholeNumber
from paceline.server.framing import named_event
from paceline.server.parameters import request_options, sampling_params, token_limit
from paceline.server.service import Service

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_USES = {"auto": ToolUse.AUTO, "any": ToolUse.REQUIRED, "tool": ToolUse.REQUIRED, "none": ToolUse.NONE}
_KEEPS_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
_BILLING_MARK = "x-anthropic-"
"""A first system text that begins so is a note to Anthropic's servers. It changes with every turn, so that no prefix would be reused."""


class TextBlock(Fields, at=("messages", "content[]")):
    type: Literal["text"]
    text: str


class ThinkingBlock(Fields, at=("messages", "content[]")):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Fields, at=("messages", "content[]")):
    """Reasoning that another server encrypted. It is not read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Fields, at=("messages", "content[]")):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Fields, at=("messages", "content[]")):
    """The result of a call. If the call failed, its text must say so: chat templates have no place for `is_error`."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | FastList[TextBlock] | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
_ROLES: dict[type[Block], str] = {ThinkingBlock: "assistant", ToolUseBlock: "assistant", ToolResultBlock: "user"}


class Message(Fields, at=("messages", "messages[]")):
    role: Literal["user", "assistant", "system"]
    content: str | FastList[Annotated[Block, Field(discriminator="type")]]

    @property
    def blocks(self) -> list[Block]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else list(self.content)


class Thinking(Fields, at=("messages", "thinking")):
    type: Literal["enabled", "disabled", "adaptive"]


class Format(Fields, at=("messages", "output_config.format")):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields, at=("messages", "output_config")):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class ContextManagement(Fields, at=("messages", "context_management")):
    """Parts of a conversation that the model shall not see."""

    edits: list[dict[str, Any]] | None = None


class ToolFields(Fields, at=("messages", "tools[]")):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Fields, at=("messages", "tool_choice")):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ConversationFields(SamplingFields, at=("messages", "")):
    """The body of `/v1/messages/count_tokens`: also the fields of `/v1/messages` that make the prompt."""

    model: str | None = None
    messages: FastList[Message]
    system: str | FastList[TextBlock] | None = None
    tools: FastList[ToolFields] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None

    def parameter_names(self) -> Mapping[str, str]:
        form = "tools" if self.output_config is None or self.output_config.format is None else "output_config.format"
        return {
            "prompt": "messages",
            "messages[": "messages",
            "stop": "stop_sequences",
            "reasoning_effort": "output_config.effort",
            "adapter": "model",
            "grammar": form,
        }


class MessagesFields(ConversationFields):
    """The body of `/v1/messages`."""

    max_tokens: WholeNumber
    stop_sequences: FastList[str] | None = None
    stream: bool | None = None


def count_tokens(service: Service, fields: ConversationFields) -> dict[str, int]:
    """Count the tokens of a conversation, which may be too long to be answered."""
    chat = _chat_request(fields, service, SamplingParams(), service.adapter_of(fields.model))
    return {"input_tokens": len(service.chat.prompt_ids(chat))}


def messages(service: Service, fields: MessagesFields) -> "_Message":
    """Answer a conversation."""
    adapter = service.adapter_of(fields.model)
    limit = token_limit("max_tokens", fields.max_tokens)
    form = fields.output_config.format if fields.output_config is not None else None
    grammar = None if form is None else schema_grammar("output_config.format", form.json_schema, service.settings)
    defaults = service.sampling_defaults.chat
    params = sampling_params(fields, service.settings, defaults, max_tokens=limit, stop=fields.stop_sequences, grammar=grammar)
    request = _chat_request(fields, service, params, adapter, fills_context=limit is None)
    return _Message(service, fields, request)


def _chat_request(
    fields: ConversationFields, service: Service, params: SamplingParams, adapter: str | None, *, fills_context: bool = False
) -> ChatRequest:
    edits = [] if fields.context_management is None else fields.context_management.edits or []
    if any(edit != _KEEPS_ALL for edit in edits):
        raise unsupported("context_management.edits", f"send {_KEEPS_ALL}, and leave out yourself what the model shall not see")
    turns = conversation(fields)
    messages = turns.messages()
    check_length("messages", num_chars(messages), service.settings)
    return ChatRequest(
        messages=messages,
        tools=checked_tools(fields.tools, service.settings, parameters="input_schema"),
        **_tool_choice(fields.tool_choice),
        template_options=_template_options(fields, service),
        continue_final_message=turns.last is not None and turns.last["role"] == "assistant",
        params=params,
        options=request_options(fields, adapter=adapter),
        fills_context=fills_context,
    )


def conversation(fields: ConversationFields) -> Turns:
    """Return the messages as chat templates take them; HttpError if a block does not fit its message."""
    turns = Turns()
    if system := _system_texts(fields.system):
        turns.add_text("system", system)
    for index, message in enumerate(fields.messages):
        place = f"messages[{index}].content"
        if not message.content and message.role != "assistant":
            raise invalid(place, "is empty: send a text, or leave the message out")
        for at, block in enumerate(message.blocks):
            if _ROLES.get(type(block), message.role) != message.role:
                role = _ROLES[type(block)]
                raise unsupported(f"{place}[{at}].type", f"{block.type} belongs to the role {role}, and the message is of {message.role}")
            _add(turns, message.role, block)
    last = turns.last
    if last is None or last["role"] != "assistant":
        return turns
    if last.get("tool_calls"):
        raise invalid("messages", "ends with a call: send its result too")
    if not any(part["text"].strip() for part in last["content"]):
        turns.drop_last()
    return turns


def _system_texts(system: str | list[TextBlock] | None) -> list[str]:
    """Return the texts of the system prompt, without the billing mark: a first block, or the first line of a single text."""
    if isinstance(system, str):
        return [system.partition("\n")[2] if system.startswith(_BILLING_MARK) else system]
    texts = [block.text for block in system or []]
    return texts[1:] if texts and texts[0].startswith(_BILLING_MARK) else texts


def _add(turns: Turns, role: str, block: Block) -> None:
    if isinstance(block, TextBlock):
        turns.add_text(role, [block.text])
    elif isinstance(block, ThinkingBlock):
        turns.add_reasoning(block.thinking)
    elif isinstance(block, ToolUseBlock):
        turns.add_call(block.id, block.name, block.input)
    elif isinstance(block, ToolResultBlock):
        given = block.content or ""
        turns.add_result(block.tool_use_id, None, [given] if isinstance(given, str) else [one.text for one in given])


def _tool_choice(choice: ToolChoice | None) -> dict[str, Any]:
    """Fields of a `ChatRequest`: whether tools are called, the only one that is, and whether several are."""
    if choice is None:
        return {}
    if choice.type == "tool" and choice.name is None:
        raise invalid("tool_choice.name", "is missing: a tool_choice of the type tool names one of the tools")
    name = choice.name if choice.type == "tool" else None
    return {"tool_use": _USES[choice.type], "tool_name": name, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _template_options(fields: ConversationFields, service: Service) -> dict[str, Any]:
    """Return the chat template's variables for thinking; Anthropic's defaults, "adaptive" and the effort "high", set none."""
    thinks = None if fields.thinking is None or fields.thinking.type == "adaptive" else fields.thinking.type == "enabled"
    effort = None if fields.output_config is None else fields.output_config.effort
    if effort == "high" or thinks is False:
        effort = None
    return service.chat.thinking_options(fields, thinks=thinks, effort=effort)


@dataclass(frozen=True, slots=True)
class _Message:
    service: Service
    fields: MessagesFields
    request: ChatRequest

    async def collect(self) -> Answer:
        (answer,) = await self.service.chat.collect(self.request)
        return answer

    def whole(self, answer: Answer) -> dict[str, Any]:
        return {
            **self._message(answer.output.usage),
            "content": [_block(part) for part in answer.parts],
            **self._ending(answer.output, answer.finish_reason),
            "speculation": self._speculation(answer.output),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events: the message without content, each block with its pieces, then its end."""
        writer, has_begun = BlockWriter(), False
        async with aclosing(self.service.chat.stream(self.request)) as stream:
            async for step in stream:
                if not has_begun:
                    has_begun = True
                    yield named_event({"type": "message_start", "message": self._message(step.chunk.usage)})
                for event in step.events:
                    for fields in writer.objects_of(event):
                        yield named_event(fields)
                    if isinstance(event, Finished):
                        delta, usage = self._ending(event.output, event.finish_reason), _usage(event.output.usage)
                        more = {"delta": delta, "usage": usage, "speculation": self._speculation(event.output)}
                        yield named_event({"type": "message_delta", **more})
        yield named_event({"type": "message_stop"})

    def _message(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": self.service.name_of(self.request.options),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _ending(self, output: RequestOutput, finish_reason: str) -> dict[str, Any]:
        reason = _STOP_REASONS.get(finish_reason, finish_reason)
        if finish_reason == "stop" and output.stop_text is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_text}
        if finish_reason == "length" and output.usage.completion_tokens < self.request.params.max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}

    def _speculation(self, output: RequestOutput) -> dict[str, Any]:
        return speculation_of([output], shows_origins=self.fields.shows_origins)


class BlockWriter:
    """Writes the events of an answer as events of blocks, which are numbered. Only one block is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""

    def objects_of(self, event: Event) -> Iterator[dict[str, Any]]:
        if isinstance(event, Text):
            yield from self._begin("text", {"text": ""})
            yield self._delta({"type": "text_delta", "text": event.text})
        elif isinstance(event, Reasoning):
            yield from self._begin("thinking", {"thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": event.text})
        elif isinstance(event, ToolCallStart):
            yield from self._end()
            yield from self._begin("tool_use", {"id": event.id, "name": event.name, "input": {}})
        elif isinstance(event, ToolCallArguments):
            yield self._delta({"type": "input_json_delta", "partial_json": event.json})
        else:
            yield from self._end()

    def _begin(self, kind: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._kind == kind:
            return
        yield from self._end()
        self._kind = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **fields}}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _end(self) -> Iterator[dict[str, Any]]:
        if not self._kind:
            return
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        self._kind = ""
        yield {"type": "content_block_stop", "index": self._index}


def _block(part: Text | Reasoning | ToolCall) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    found = part.parsed()  # None if the answer ended within the call; its stop reason is then max_tokens
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": found or {}}


def _usage(usage: Usage) -> dict[str, Any]:
    """Token counts; `input_tokens` are those that were not in the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
