"""The parts of an answer: events in the order written, and the whole answer made of them."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from paceline.outputs import RequestOutput, StreamChunk

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that ends because it calls tools; the other reasons are the engine's."""


@dataclass(frozen=True, slots=True)
class Text:
    """Newly final text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Newly final text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a tool call; its arguments follow.

    Attributes:
        call: which of the answer's calls this is, from 0.
        id: made for this call; the message with the tool's result has it too.
    """

    call: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next characters of a call's arguments; all of them together are the text of a JSON object."""

    call: int
    json: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of an answer.

    Attributes:
        output: the result of the engine; its `text` is all text, markup included.
        finish_reason: "stop", "length", "abort" or "tool_calls".
    """

    output: RequestOutput
    finish_reason: str


Event = Text | Reasoning | ToolCallStart | ToolCallArguments | Finished


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens and events that one engine step added to a sample.

    Attributes:
        chunk: the engine's tokens, origins and log-probabilities. Its text is that of `events`, markup included.
        events: none while a character, a stop string or a piece of markup is incomplete.
    """

    chunk: StreamChunk
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        arguments: the text of a JSON object.
    """

    id: str
    name: str
    arguments: str = ""

    def parsed(self) -> dict[str, Any] | None:
        """Return the arguments as an object; None if they are none."""
        try:
            found = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Attributes:
        parts: as `parts_of` returns them.
        output, finish_reason: as in `Finished`.
    """

    parts: tuple[Text | Reasoning | ToolCall, ...]
    output: RequestOutput
    finish_reason: str

    @property
    def text(self) -> str:
        """All text of the answer itself."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def reasoning(self) -> str:
        """All text of the reasoning."""
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls, by their index."""
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


def parts_of(events: Iterable[Event]) -> tuple[Text | Reasoning | ToolCall, ...]:
    """Return what the events of an answer consist of, in the order written; neighbours of one kind are one part."""
    parts: list[Text | Reasoning | ToolCall] = []
    for event in events:
        last = parts[-1] if parts else None
        if isinstance(event, Text | Reasoning):
            if type(last) is type(event):
                parts[-1] = replace(event, text=last.text + event.text)
            else:
                parts.append(event)
        elif isinstance(event, ToolCallStart):
            parts.append(ToolCall(event.id, event.name))
        elif isinstance(event, ToolCallArguments):
            assert isinstance(last, ToolCall)
            parts[-1] = replace(last, arguments=last.arguments + event.json)
    return tuple(parts)
