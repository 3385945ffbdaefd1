"""From events of an answer to the items of a response, and to the events that tell of them."""

import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.parsing.events import Answer, Event, Finished, Reasoning, Text, ToolCall, ToolCallArguments, ToolCallStart

Fields = dict[str, Any]
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ItemWriter:
    """Writes one answer.

    Attributes:
        items: those that are complete.
    """

    def __init__(self) -> None:
        self.items: list[Fields] = []
        self._open: Fields | None = None
        self._text = ""

    def written(self, event: Event) -> Iterator[Fields]:
        """What is to be sent of an event."""
        if isinstance(event, Text):
            yield from self._opened("message", {"role": "assistant", "content": []})
            yield self._delta("response.output_text.delta", event.text, content_index=0, logprobs=[])
        elif isinstance(event, Reasoning):
            yield from self._opened("reasoning", {"summary": [], "content": []})
            yield self._delta("response.reasoning_text.delta", event.text, content_index=0)
        elif isinstance(event, ToolCallStart):
            yield from self._closed("completed")
            yield from self._opened("function_call", {"call_id": event.id, "name": event.name, "arguments": ""})
        elif isinstance(event, ToolCallArguments):
            yield self._delta("response.function_call_arguments.delta", event.json)
        else:
            yield from self._closed("incomplete" if event.finish_reason == "length" else "completed")

    def _opened(self, kind: str, fields: Fields) -> Iterator[Fields]:
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._closed("completed")
        self._open = {"id": f"{_PREFIXES[kind]}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress", **fields}
        yield {"type": "response.output_item.added", "output_index": len(self.items), "item": self._open}
        if kind != "function_call":
            yield self._event("response.content_part.added", content_index=0, part=_part(kind, ""))

    def _delta(self, kind: str, delta: str, **fields: Any) -> Fields:
        self._text += delta
        return self._event(kind, delta=delta, **fields)

    def _closed(self, status: str) -> Iterator[Fields]:
        if self._open is None:
            return
        kind, text = self._open["type"], self._text
        if kind == "function_call":
            yield self._event("response.function_call_arguments.done", name=self._open["name"], arguments=text)
        else:
            is_message = kind == "message"
            done = "output_text" if is_message else "reasoning_text"
            more: Fields = {"logprobs": []} if is_message else {}
            yield self._event(f"response.{done}.done", content_index=0, text=text, **more)
            yield self._event("response.content_part.done", content_index=0, part=_part(kind, text))
        item = {**self._open, "status": status, **_content(kind, text)}
        yield {"type": "response.output_item.done", "output_index": len(self.items), "item": item}
        self.items.append(item)
        self._open, self._text = None, ""

    def _event(self, kind: str, **fields: Any) -> Fields:
        assert self._open is not None
        return {"type": kind, "item_id": self._open["id"], "output_index": len(self.items), **fields}


def _part(kind: str, text: str) -> Mapping[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _content(kind: str, text: str) -> Fields:
    return {"arguments": text} if kind == "function_call" else {"content": [_part(kind, text)]}


def items_of(answer: Answer) -> list[Fields]:
    """The items of a whole answer."""
    writer = ItemWriter()
    for event in (*_events(answer), Finished(0, answer.output, answer.finish_reason)):
        deque(writer.written(event), maxlen=0)
    return writer.items


def _events(answer: Answer) -> Iterator[Event]:
    for index, part in enumerate(answer.parts):
        if isinstance(part, ToolCall):
            yield ToolCallStart(0, index, part.id, part.name)
            yield ToolCallArguments(0, index, part.arguments)
        else:
            yield part
