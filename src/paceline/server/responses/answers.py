"""The response of `/v1/responses`, whole or as events."""

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from paceline.outputs import RequestOutput
from paceline.parsing.events import Finished
from paceline.server.answering import speculation_of
from paceline.server.dialogue.request import ChatRequest
from paceline.server.framing import named_event
from paceline.server.http_errors import http_error_of
from paceline.server.responses.fields import Reasoning, ResponsesFields
from paceline.server.responses.writer import ItemWriter, items_of
from paceline.server.service import Service


@dataclass(frozen=True, slots=True)
class ResponseAnswer:
    """One request, and how it is answered."""

    service: Service
    fields: ResponsesFields
    request: ChatRequest

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        head = self._head()
        (answer,) = await self.service.dialogue.collect(self.request)
        return self._ended(head, items_of(answer), Finished(0, answer.output, answer.finish_reason))

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
            async with aclosing(self.service.dialogue.stream(self.request)) as stream:
                async for step in stream:
                    if not has_begun:
                        has_begun = True
                        yield {"type": "response.created", "response": head}
                        yield {"type": "response.in_progress", "response": head}
                    for event in step.events:
                        for fields in writer.written(event):
                            yield fields
                        if isinstance(event, Finished):
                            response = self._ended(head, writer.items, event)
                            yield {"type": f"response.{response['status']}", "response": response}
        except Exception as error:
            if not has_begun:
                raise
            found = http_error_of(error)
            failure = {"code": "server_error", "message": found.message}
            yield {"type": "response.failed", "response": {**head, "status": "failed", "error": failure, "output": writer.items}}

    def _head(self) -> dict[str, Any]:
        """The response before anything was written. What of the request a response repeats is repeated as it came."""
        fields, params = self.fields, self.request.params
        text = None if fields.text is None else fields.text.model_dump(by_alias=True, exclude_none=True)
        reasoning = fields.reasoning or Reasoning()
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
            "max_tool_calls": fields.max_tool_calls,
            "metadata": fields.metadata or {},
            "model": self.service.name_of(self.request.options),
            "output": [],
            "parallel_tool_calls": self.request.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": fields.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "safety_identifier": fields.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **(text or {})},
            "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
            "tools": fields.tools or [],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": fields.user,
        }

    def _ended(self, head: dict[str, Any], items: list[dict[str, Any]], event: Finished) -> dict[str, Any]:
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
        """Token counts; those of the reasoning are what its text has by itself."""
        tokenizer, usage = self.service.engine.opened.maker.tokenizer, output.usage
        thought = [part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]]
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in thought)},
            "total_tokens": usage.total_tokens,
        }
