"""Messages of a chat, and the fields of its request."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NoReturn

from paceline.server.fields import Fields
from paceline.server.http_errors import HttpError
from paceline.server.limits import check_count, check_length
from paceline.server.openai.fields import TextFields
from paceline.server.settings import ServerSettings

_LATER = "this server calls no tools yet"
_TEXT_ONLY = "this server reads and writes text only"
_NO_CONTROL = "the model is not told how to think or write; say it in a message"


class Message(Fields):
    """One turn. `refusal` and the like are what OpenAI's answers hold, which clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class Prediction(Fields):
    """A text that the answer will resemble."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class ChatFields(TextFields):
    """The body of `/v1/chat/completions`."""

    refused: ClassVar[Mapping[str, str]] = {
        "tools": _LATER,
        "functions": _LATER,
        "function_call": _LATER,
        "parallel_tool_calls": _LATER,
        "audio": _TEXT_ONLY,
        "web_search_options": "this server reaches no other one",
        "reasoning_effort": _NO_CONTROL,
        "verbosity": _NO_CONTROL,
        "store": "nothing is stored",
    }

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prediction: Prediction | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def check_refused(self, within: str = "") -> None:
        super().check_refused(within)
        if self.tool_choice not in (None, "none", "auto"):
            raise HttpError(400, f"tool_choice is not served: {_LATER}", parameter="tool_choice", code="unsupported_parameter")
        if self.modalities not in (None, ["text"]):
            raise HttpError(400, f"modalities is not served: {_TEXT_ONLY}", parameter="modalities", code="unsupported_parameter")


def conversation(fields: ChatFields, settings: ServerSettings) -> list[dict[str, Any]]:
    """The messages as chat templates know them.

    Raises:
        HttpError: there are too many, they are too long, or a part of one is not served.
    """
    check_count("messages", len(fields.messages), settings.max_messages)
    turns = [_turn(index, message) for index, message in enumerate(fields.messages)]
    check_length("messages", sum(_num_chars(turn["content"]) for turn in turns), settings)
    return turns


def predicted_text(prediction: Prediction | None) -> str | None:
    """The text of a prediction."""
    if prediction is None or isinstance(prediction.content, str):
        return None if prediction is None else str(prediction.content)
    return "".join(_text("prediction", part) for part in prediction.content)


def _turn(index: int, message: Message) -> dict[str, Any]:
    for name in ("tool_calls", "tool_call_id", "function_call", "audio"):
        if getattr(message, name):
            _refuse(f"messages[{index}].{name}", _TEXT_ONLY if name == "audio" else _LATER)
    if message.role in ("tool", "function"):
        _refuse(f"messages[{index}].role", _LATER)
    if message.content is None:
        text = f"messages[{index}].content is missing: send a text"
        raise HttpError(400, text, parameter=f"messages[{index}].content", code="missing_required_parameter")
    content = message.content
    if not isinstance(content, str):
        content = [{"type": "text", "text": _text(f"messages[{index}].content", part)} for part in content]
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    return turn if message.name is None else {**turn, "name": message.name}


def _text(name: str, part: Mapping[str, Any]) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        _refuse(name, f"a part of it is not of the type text, and {_TEXT_ONLY}")
    if not isinstance(text, str):
        raise HttpError(400, f"{name} has a part without a text: send it", parameter=name, code="invalid_value")
    return text


def _num_chars(content: str | list[dict[str, str]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


def _refuse(name: str, reason: str) -> NoReturn:
    raise HttpError(400, f"{name} is not served: {reason}", parameter=name, code="unsupported_parameter")
