"""The parts of an answer: events in the order written, the sink that collects them, and what they amount to."""

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from paceline.outputs import RequestOutput, StreamChunk
from paceline.parsing.json_completer import JsonCompleter
from paceline.parsing.tools import Tool

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that ends because it calls tools; the other reasons are the engine's."""
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


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


def call_id() -> str:
    """Return a new id of a call, in the form of OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Return a new id of nine letters and digits; Mistral's templates refuse others."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class EventSink:
    """Collects the events of one answer.

    The arguments of each call form a JSON object: strings, lists and objects that are open at the end of a call are closed.

    Args:
        tools: tools in the prompt.
        max_calls: largest number of calls; further calls are text. None = no limit.
        new_id: returns an id for a call that has none.

    Attributes:
        num_calls: number of calls that were begun.
        broken_off: indices of the calls whose arguments ended within a string.
        unclosed: indices of the calls whose arguments lacked a closing brace, bracket or quote; many models omit the last brace.
        has_text: whether the answer has text.
    """

    def __init__(self, tools: Sequence[Tool], max_calls: int | None, new_id: Callable[[], str]) -> None:
        self._new_id, self._max_calls = new_id, max_calls
        self._tools = {tool.name: tool for tool in tools}
        self._completer = JsonCompleter()
        self._has_arguments = False
        self._pieces: list[str] = []  # of arguments, not yet completed
        self.num_calls = 0
        self.broken_off: set[int] = set()
        self.unclosed: set[int] = set()
        self.has_text = False
        self._events: list[Event] = []

    def take(self) -> list[Event]:
        """Return the events since the last time."""
        self._pass_arguments()
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        """Add to the text of the answer."""
        if text:
            self._pass_arguments()
            self.has_text = True
            self._events.append(Text(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._pass_arguments()
            self._events.append(Reasoning(text))

    @property
    def tool_names(self) -> Collection[str]:
        return self._tools.keys()

    def schema_of(self, name: str) -> Mapping[str, Any] | None:
        """Return the schema of a tool's arguments; None if there is none."""
        return self._tools[name].parameters if name in self._tools else None

    def has_tool(self, name: str) -> bool:
        """Return whether the prompt has a tool of this name. True for every name if the prompt has no tools."""
        return not self._tools or name in self._tools

    @property
    def can_call(self) -> bool:
        """Whether the answer may have one more call."""
        return self._max_calls is None or self.num_calls < self._max_calls

    @contextmanager
    def call(self, name: str, call_id: str | None = None) -> Iterator[None]:
        """Begin a call, whose arguments are added in this block. The id is made here unless the model wrote one."""
        self._events.append(ToolCallStart(self.num_calls, call_id or self._new_id(), name))
        self.num_calls += 1
        self._completer, self._has_arguments = JsonCompleter(), False
        try:
            yield
        finally:
            self._complete_call()

    def _complete_call(self) -> None:
        self._pass_arguments()
        if self._completer.in_string:
            self.broken_off.add(self.num_calls - 1)
        if self._completer.is_open:
            self.unclosed.add(self.num_calls - 1)
        self._add_arguments(self._completer.close() if self._has_arguments else "{}")

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call; what JSON needs at their end may be missing."""
        self._pieces.append(text)

    def _pass_arguments(self) -> None:
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            self._add_arguments(self._completer.add("".join(pieces)))

    def _add_arguments(self, text: str) -> None:
        if text:
            self._has_arguments = True
            self._events.append(ToolCallArguments(self.num_calls - 1, text))
