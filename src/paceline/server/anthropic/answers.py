"""Anthropic's answers: a message of blocks, whole or as events."""

import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from paceline.outputs import RequestOutput, Usage
from paceline.parsing.events import Event, Finished, Reasoning, Text, ToolCall, ToolCallArguments, ToolCallStart
from paceline.server.answering import speculation_of
from paceline.server.dialogue.request import ChatRequest
from paceline.server.framing import named_event
from paceline.server.service import Service

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(frozen=True, slots=True)
class MessageAnswer:
    """One request, and how it is answered."""

    service: Service
    request: ChatRequest
    shows_origins: bool

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        (answer,) = await self.service.dialogue.collect(self.request)
        return {
            **self._message(answer.output.usage),
            "content": [_block(part) for part in answer.parts],
            **self._ending(answer.output, answer.finish_reason),
            "speculation": self._speculation(answer.output),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events: the message without content, each block with its pieces, then how it ended."""
        blocks, has_begun = _Blocks(), False
        async with aclosing(self.service.dialogue.stream(self.request)) as stream:
            async for step in stream:
                if not has_begun:
                    has_begun = True
                    yield named_event({"type": "message_start", "message": self._message(step.chunk.usage)})
                for event in step.events:
                    for fields in blocks.written(event):
                        yield named_event(fields)
                    if isinstance(event, Finished):
                        yield named_event(self._message_delta(event))
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

    def _message_delta(self, event: Finished) -> dict[str, Any]:
        ending = self._ending(event.output, event.finish_reason)
        return {
            "type": "message_delta",
            "delta": ending,
            "usage": _usage(event.output.usage),
            "speculation": self._speculation(event.output),
        }

    def _ending(self, output: RequestOutput, finish_reason: str) -> dict[str, Any]:
        reason = _STOP_REASONS.get(finish_reason, finish_reason)
        if finish_reason == "stop" and output.stop_text is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_text}
        if finish_reason == "length" and output.usage.completion_tokens < self.request.params.max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}

    def _speculation(self, output: RequestOutput) -> dict[str, Any]:
        return speculation_of([output], shows_origins=self.shows_origins)


class _Blocks:
    """Writes events of an answer as events of blocks, which are numbered and never open two at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""

    def written(self, event: Event) -> Iterator[dict[str, Any]]:
        """What is to be sent of an event."""
        if isinstance(event, Text):
            yield from self._opened("text", {"text": ""})
            yield self._delta({"type": "text_delta", "text": event.text})
        elif isinstance(event, Reasoning):
            yield from self._opened("thinking", {"thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": event.text})
        elif isinstance(event, ToolCallStart):
            yield from self._closed()
            yield from self._opened("tool_use", {"id": event.id, "name": event.name, "input": {}})
        elif isinstance(event, ToolCallArguments):
            yield self._delta({"type": "input_json_delta", "partial_json": event.json})
        else:
            yield from self._closed()

    def _opened(self, kind: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._kind == kind:
            return
        yield from self._closed()
        self._kind = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **fields}}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _closed(self) -> Iterator[dict[str, Any]]:
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
    found = part.parsed()  # None where the answer broke off within the call, which its stop reason says
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": found or {}}


def _usage(usage: Usage) -> dict[str, Any]:
    """Token counts; `input_tokens` are those that were not in the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
