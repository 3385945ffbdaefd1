"""Anthropic's conversations: system prompt, turns of blocks, tools."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from paceline.parsing.tools import Tool as OfferedTool
from paceline.parsing.tools import ToolUse
from paceline.server.anthropic.fields import ConversationFields, Tool
from paceline.server.dialogue.tools import checked_tools
from paceline.server.dialogue.turns import Turns
from paceline.server.fields import Fields, read_fields
from paceline.server.http_errors import HttpError
from paceline.server.limits import check_count, check_length, num_chars
from paceline.server.settings import ServerSettings
from paceline.server.wrong_fields import shown

_USES = {"auto": ToolUse.AUTO, "any": ToolUse.REQUIRED, "tool": ToolUse.REQUIRED, "none": ToolUse.NONE}


class TextBlock(Fields):
    """A text; `cache_control` says nothing about it."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None


class ThinkingBlock(Fields):
    """What an answer thought; nobody here signed it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Fields):
    """A call in an answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None


class ToolResultBlock(Fields):
    """What a call gave; that it failed, its text must say, for chat templates have no word for it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
TEXTS = "texts"  # what stands within a block, or in the system prompt
_KINDS: dict[str, dict[str, type[Block]]] = {
    TEXTS: {"text": TextBlock},
    "system": {"text": TextBlock},
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
}


def conversation(fields: ConversationFields, settings: ServerSettings) -> list[dict[str, Any]]:
    """The messages as chat templates know them.

    Raises:
        HttpError: there are too many, they are too long, end with an answer, or a part of one is not served.
    """
    check_count("messages", len(fields.messages), settings.max_messages)
    turns = Turns()
    if fields.system is not None:
        turns.say("system", _texts("system", fields.system))
    for index, message in enumerate(fields.messages):
        for place, block in _blocks(f"messages[{index}].content", message.role, message.content):
            _add(turns, message.role, place, block)
    if turns.last_role == "assistant":
        text = "messages ends with an answer, and the model begins each of its own: end with a user's message"
        raise HttpError(400, text, parameter="messages", code="unsupported_value")
    messages = turns.messages()
    check_length("messages", num_chars(messages), settings)
    return messages


def offered_tools(fields: ConversationFields, settings: ServerSettings) -> tuple[OfferedTool, ...]:
    """The tools that the model may call.

    Raises:
        HttpError: one is wrong, or not served.
    """
    return checked_tools(fields.tools, _tool, settings, parameters="input_schema")


def tool_use(fields: ConversationFields) -> dict[str, Any]:
    """What of a `ChatRequest` says whether they are called."""
    choice = fields.tool_choice
    if choice is None:
        return {}
    if (choice.type == "tool") != (choice.name is not None):
        text = f"tool_choice of the type {choice.type} {'needs a' if choice.type == 'tool' else 'has no'} name"
        raise HttpError(400, f"{text}: send one that fits", parameter="tool_choice.name", code="invalid_value")
    return {
        "tool_use": _USES[choice.type],
        "tool_name": choice.name,
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _tool(place: str, given: Mapping[str, Any]) -> OfferedTool:
    if given.get("type") not in (None, "custom"):
        raise HttpError(
            400,
            f"{place}.type is not served: this server has no tools of its own, send type custom and run the tool yourself",
            parameter=f"{place}.type",
            code="unsupported_parameter",
        )
    tool = read_fields(Tool, place, given)
    tool.check_refused(place)
    return OfferedTool(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=bool(tool.strict))


def _add(turns: Turns, role: str, place: str, block: Block) -> None:
    if isinstance(block, TextBlock):
        turns.say(role, [block.text])
    elif isinstance(block, ThinkingBlock):
        turns.think(block.thinking)
    elif isinstance(block, ToolUseBlock):
        turns.call(block.id, block.name, block.input)
    else:
        turns.result(f"{place}.tool_use_id", block.tool_use_id, _texts(f"{place}.content", block.content or ""))


def _texts(place: str, content: str | Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts of a content that may hold nothing else."""
    return [block.text for _, block in _blocks(place, TEXTS, content) if isinstance(block, TextBlock)]


def _blocks(place: str, role: str, content: str | Sequence[Mapping[str, Any]]) -> list[tuple[str, Block]]:
    if isinstance(content, str):
        return [(place, TextBlock(type="text", text=content))]
    if not content and role != TEXTS:
        raise HttpError(400, f"{place} is empty: send a block, or leave the message out", parameter=place, code="invalid_value")
    found = []
    for index, given in enumerate(content):
        one, kind = f"{place}[{index}]", given.get("type")
        model = _KINDS[role].get(kind) if isinstance(kind, str) else None
        if model is None:
            where = "here" if role == TEXTS else f"in messages of the role {role}"
            text = f"{one}.type is {shown(kind)}, which is not served {where}: send blocks of the type {', '.join(_KINDS[role])}"
            raise HttpError(400, text, parameter=f"{one}.type", code="unsupported_parameter")
        found.append((one, read_fields(model, one, given)))
    return found
