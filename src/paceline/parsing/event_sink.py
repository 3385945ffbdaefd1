"""Where readers of markup tell what they found: it becomes the events of one sample."""

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.parsing.events import Event, Reasoning, Text, ToolCallArguments, ToolCallStart
from paceline.parsing.tools import Tool

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def call_id() -> str:
    """An id for a call, as OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters and digits: other ids Mistral's templates refuse."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class EventSink:
    """Takes down one sample.

    Args:
        sample: its index.
        tools: those that the model was told of.
        max_calls: how many calls it may have; what would be more is text.
        new_id: makes ids of calls.

    Attributes:
        num_calls: calls that were begun.
        num_complete: calls whose arguments are complete.
        has_text: whether the answer has text.
    """

    def __init__(self, sample: int, tools: Sequence[Tool], max_calls: int | None, new_id: Callable[[], str]) -> None:
        self._sample, self._new_id, self._max_calls = sample, new_id, max_calls
        self._tools = {tool.name: tool for tool in tools}
        self.num_calls = self.num_complete = 0
        self.has_text = False
        self._events: list[Event] = []

    def take(self) -> list[Event]:
        """What was told since the last time."""
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        """The answer goes on."""
        if text:
            self.has_text = True
            self._events.append(Text(self._sample, text))

    def reasoning(self, text: str) -> None:
        """The thoughts go on."""
        if text:
            self._events.append(Reasoning(self._sample, text))

    @property
    def tool_names(self) -> Collection[str]:
        """Names of the tools that the model was told of."""
        return self._tools.keys()

    def schema_of(self, name: str) -> Mapping[str, Any] | None:
        """The schema of a tool's arguments; None where nothing is known of them."""
        return self._tools[name].parameters if name in self._tools else None

    @property
    def can_call(self) -> bool:
        """Whether one more call may be told."""
        return self._max_calls is None or self.num_calls < self._max_calls

    @contextmanager
    def call(self, name: str, call_id: str | None = None) -> Iterator[None]:
        """A call, whose arguments are told in this block; its id is made here unless the model wrote one."""
        self._events.append(ToolCallStart(self._sample, self.num_calls, call_id or self._new_id(), name))
        self.num_calls += 1
        yield
        self.num_complete += 1

    def arguments(self, text: str) -> None:
        """The arguments of the call go on."""
        if text:
            self._events.append(ToolCallArguments(self._sample, self.num_calls - 1, text))
