"""Tools in OpenAI's fields: what may be called, what was called, and how thoughts are asked for."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

from paceline.parsing.events import ToolCall, ToolCallArguments, ToolCallStart
from paceline.parsing.tools import Tool, ToolUse
from paceline.server.dialogue.thinking import thinking_options
from paceline.server.dialogue.tools import checked_tools
from paceline.server.fields import Fields
from paceline.server.http_errors import HttpError
from paceline.server.settings import ServerSettings
from paceline.server.wrong_fields import shown
from paceline.tokenizer.tokenizer import Tokenizer


class FunctionFields(Fields):
    """A function, described."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(Fields):
    """A tool; there are no others than functions."""

    type: Literal["function"]
    function: FunctionFields


class CalledFunction(Fields):
    """What was called, with the text of a JSON object."""

    name: str
    arguments: str


class ToolCallFields(Fields):
    """A call in a message that was an answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def as_template(self) -> dict[str, Any]:
        """The call as chat templates know it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


def tools_of(given: Sequence[ToolFields] | None, settings: ServerSettings) -> tuple[Tool, ...]:
    """The tools of a request.

    Raises:
        HttpError: they are too many or too long, or a name is none.
    """
    return checked_tools(given, _tool, settings, within=".function")


def _tool(_: str, given: ToolFields) -> Tool:
    one = given.function
    return Tool(name=one.name, description=one.description, parameters=one.parameters, strict=bool(one.strict))


def tool_use_of(choice: str | Mapping[str, Any] | None) -> tuple[ToolUse, str | None]:
    """Whether tools are called, and the only one that is.

    Raises:
        HttpError: it is none of OpenAI's choices.
    """
    if choice is None:
        return ToolUse.AUTO, None
    if isinstance(choice, str):
        if choice in [use.value for use in ToolUse]:
            return ToolUse(choice), None
    elif choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return ToolUse.REQUIRED, name
    text = 'tool_choice is none we serve: use none, auto, required or {"type": "function", "function": {"name": ...}}'
    _wrong("tool_choice", text)


def template_options(effort: str | None, given: Mapping[str, Any] | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the chat template is told: `chat_template_kwargs`, and how much to think in the template's own words.

    Raises:
        HttpError, RequestError: the template cannot be told, or is told two things.
    """
    told = thinking_options(tokenizer, effort=effort)
    meant = {} if effort is None else {"enable_thinking": effort != "none", "reasoning_effort": effort}
    for name, value in (given or {}).items():
        if meant.get(name, value) != value:
            text = f"chat_template_kwargs.{name} is {shown(value)}, and reasoning_effort {shown(effort)} says another thing"
            _wrong(f"chat_template_kwargs.{name}", f"{text}: send one of them")
    return {**told, **(given or {})}


def call_fields(call: ToolCall) -> dict[str, Any]:
    """A call in a whole answer."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def call_delta(event: ToolCallStart | ToolCallArguments) -> dict[str, Any]:
    """The same, piece by piece."""
    if isinstance(event, ToolCallArguments):
        return {"index": event.call, "function": {"arguments": event.json}}
    return {"index": event.call, "id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}


def _wrong(name: str, text: str) -> NoReturn:
    raise HttpError(400, text, parameter=name, code="invalid_value")
