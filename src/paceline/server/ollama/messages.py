"""Ollama's conversations: messages and tools."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from paceline.parsing.tools import Tool as OfferedTool
from paceline.server.dialogue.tools import checked_tools
from paceline.server.dialogue.turns import Turns
from paceline.server.fields import Fields, read_fields
from paceline.server.limits import check_count, check_length, num_chars
from paceline.server.ollama.fields import ChatFields
from paceline.server.settings import ServerSettings


class CallFunction(Fields):
    """What was called; `index` is its place among the calls of an answer."""

    name: str
    arguments: dict[str, Any]
    index: int | None = None


class Call(Fields):
    """A call in an answer."""

    function: CallFunction
    id: str | None = None
    type: Literal["function"] | None = None


class Message(Fields):
    """One turn."""

    refused: ClassVar[Mapping[str, str]] = {"images": "this server reads and writes text only"}

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Any = None


class Function(Fields):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Fields):
    """A tool, which is a function."""

    type: Literal["function"] = "function"
    function: Function


def conversation(fields: ChatFields, settings: ServerSettings) -> list[dict[str, Any]]:
    """The messages as chat templates know them.

    Raises:
        HttpError: there are too many, they are too long, or a part of one is not served.
    """
    given = fields.messages or []
    check_count("messages", len(given), settings.max_messages)
    turns, pending = Turns(), list[tuple[str, str]]()
    for index, one in enumerate(given):
        _add(turns, pending, f"messages[{index}]", one)
    messages = turns.messages()
    check_length("messages", num_chars(messages), settings)
    return messages


def offered_tools(fields: ChatFields, settings: ServerSettings) -> tuple[OfferedTool, ...]:
    """The tools that the model may call.

    Raises:
        HttpError: one is wrong.
    """
    return checked_tools(fields.tools, _tool, settings)


def _tool(place: str, given: Mapping[str, Any]) -> OfferedTool:
    function = read_fields(Tool, place, given).function
    return OfferedTool(name=function.name, description=function.description, parameters=function.parameters)


def _add(turns: Turns, pending: list[tuple[str, str]], place: str, given: Mapping[str, Any]) -> None:
    """Add a message; `pending` are the calls, by id and name, whose results are still to come."""
    message = read_fields(Message, place, given)
    message.check_refused(place)
    if message.role == "tool":
        turns.result(f"{place}.role", _answered_call(pending, message), [message.content or ""])
        return
    if message.thinking:
        turns.think(message.thinking)
    if message.content or not message.tool_calls:
        turns.say(message.role, [message.content or ""])
    for index, one in enumerate(message.tool_calls or []):
        call = read_fields(Call, f"{place}.tool_calls[{index}]", one)
        call_id = call.id or f"{place}.{index}"
        pending.append((call_id, call.function.name))
        turns.call(call_id, call.function.name, call.function.arguments)


def _answered_call(pending: list[tuple[str, str]], message: Message) -> str:
    """The call that a result is of: the one it names, else the next one of that tool, else the next one; empty = none."""
    for call in pending:
        if message.tool_call_id == call[0] if message.tool_call_id else message.tool_name in (None, call[1]):
            pending.remove(call)
            return call[0]
    return ""
