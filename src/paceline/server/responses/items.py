"""What `/v1/responses` is sent: items of a conversation, and tools."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from paceline.parsing.tools import Tool as OfferedTool
from paceline.parsing.tools import ToolUse
from paceline.server.dialogue.tools import checked_tools
from paceline.server.dialogue.turns import Turns
from paceline.server.fields import Fields, read_fields
from paceline.server.http_errors import HttpError
from paceline.server.limits import check_count, check_length, num_chars
from paceline.server.responses.fields import ResponsesFields, Tool
from paceline.server.settings import ServerSettings

Status = Literal["in_progress", "completed", "incomplete"]


class Part(Fields):
    """A text within a message; the others are what answers hold, which clients send back."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class Refusal(Fields):
    """A text by which another server's model refused."""

    type: Literal["refusal"]
    refusal: str


class Message(Fields):
    """One turn, or a part of one."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class FunctionCall(Fields):
    """A call in an answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(Fields):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None
    status: Status | None = None


class ReasoningItem(Fields):
    """What an answer thought; without `content`, as other servers send it, there is nothing to read."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


Item = Message | FunctionCall | FunctionCallOutput | ReasoningItem
_KINDS: dict[str, type[Item]] = {
    "message": Message,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningItem,
}
_TEXT_KINDS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def conversation(fields: ResponsesFields, settings: ServerSettings) -> list[dict[str, Any]]:
    """The input as chat templates know it.

    Raises:
        HttpError: there are too many items, they are too long, or one is not served.
    """
    turns = Turns()
    if fields.instructions is not None:
        turns.say("system", [fields.instructions])
    if isinstance(fields.input, str):
        turns.say("user", [fields.input])
    else:
        check_count("input", len(fields.input), settings.max_messages)
        for index, given in enumerate(fields.input):
            _add(turns, f"input[{index}]", given)
    messages = turns.messages()
    check_length("input", num_chars(messages), settings)
    return messages


def offered_tools(fields: ResponsesFields, settings: ServerSettings) -> tuple[OfferedTool, ...]:
    """The tools that the model may call.

    Raises:
        HttpError: one is wrong, or not served.
    """
    return checked_tools(fields.tools, _tool, settings)


def tool_use(fields: ResponsesFields) -> dict[str, Any]:
    """What of a `ChatRequest` says whether they are called.

    Raises:
        HttpError: it is not served.
    """
    found: dict[str, Any] = {"parallel_tool_calls": fields.parallel_tool_calls is not False}
    choice = fields.tool_choice
    if isinstance(choice, str):
        found["tool_use"] = ToolUse(choice)
    elif choice is not None:
        name = choice.get("name")
        if set(choice) != {"type", "name"} or choice["type"] != "function" or not isinstance(name, str):
            text = 'tool_choice is not served: send "none", "auto", "required" or {"type": "function", "name": ...}'
            raise HttpError(400, text, parameter="tool_choice", code="unsupported_parameter")
        found |= {"tool_use": ToolUse.REQUIRED, "tool_name": name}
    return found


def _tool(place: str, given: Mapping[str, Any]) -> OfferedTool:
    if given.get("type") != "function":
        text = f"{place}.type is not served: this server has no tools of its own, send type function and run the tool yourself"
        raise HttpError(400, text, parameter=f"{place}.type", code="unsupported_parameter")
    tool = read_fields(Tool, place, given)
    tool.check_refused(place)
    return OfferedTool(name=tool.name, description=tool.description, parameters=tool.parameters, strict=bool(tool.strict))


def _add(turns: Turns, place: str, given: Mapping[str, Any]) -> None:
    kind = given.get("type", "message")
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        text = f"{place}.type is not served: send items of the type {', '.join(_KINDS)}"
        raise HttpError(400, text, parameter=f"{place}.type", code="unsupported_parameter")
    item = read_fields(model, place, given)
    if isinstance(item, Message):
        turns.say("system" if item.role == "developer" else item.role, _texts(f"{place}.content", item.content))
    elif isinstance(item, FunctionCall):
        turns.call(item.call_id, item.name, item.arguments)
    elif isinstance(item, FunctionCallOutput):
        turns.result(f"{place}.call_id", item.call_id, _texts(f"{place}.output", item.output))
    else:
        if text := "".join(_texts(f"{place}.content", item.content or [])):
            turns.think(text)


def _texts(place: str, content: str | Sequence[Mapping[str, Any]]) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(f"{place}[{index}]", given) for index, given in enumerate(content)]


def _text(place: str, given: Mapping[str, Any]) -> str:
    kind = given.get("type")
    if kind == "refusal":
        return read_fields(Refusal, place, given).refusal
    if kind not in _TEXT_KINDS:
        text = f"{place}.type is not served: this server reads and writes text only"
        raise HttpError(400, text, parameter=f"{place}.type", code="unsupported_parameter")
    return read_fields(Part, place, given).text
