"""Messages of a chat, and the fields of its request."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NoReturn

from paceline.server.fields import Fields
from paceline.server.http_errors import HttpError
from paceline.server.limits import check_count, check_length
from paceline.server.openai.fields import TextFields
from paceline.server.openai.tools import ToolCallFields, ToolFields
from paceline.server.settings import ServerSettings

_OLD = "it is the old form of tools; send those"
_TEXT_ONLY = "this server reads and writes text only"


class Message(Fields):
    """One turn. `refusal` and the like are what answers hold, which clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    tool_calls: list[ToolCallFields] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class Prediction(Fields):
    """A text that the answer will resemble."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class ChatFields(TextFields):
    """The body of `/v1/chat/completions`."""

    refused: ClassVar[Mapping[str, str]] = {
        "functions": _OLD,
        "function_call": _OLD,
        "audio": _TEXT_ONLY,
        "web_search_options": "this server reaches no other one",
        "verbosity": "the model is not told how to write; say it in a message",
        "store": "nothing is stored",
    }

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prediction: Prediction | None = None
    tools: list[ToolFields] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    verbosity: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def check_refused(self, within: str = "") -> None:
        super().check_refused(within)
        if self.modalities not in (None, ["text"]):
            raise HttpError(400, f"modalities is not served: {_TEXT_ONLY}", parameter="modalities", code="unsupported_parameter")


def conversation(fields: ChatFields, settings: ServerSettings) -> list[dict[str, Any]]:
    """The messages as chat templates know them.

    Raises:
        HttpError: there are too many, they are too long, or a part of one is not served.
    """
    check_count("messages", len(fields.messages), settings.max_messages)
    turns, call_ids = [], set[str]()
    for index, message in enumerate(fields.messages):
        turns.append(_turn(index, message))
        call_ids |= {call.id for call in message.tool_calls or ()}
        if message.role == "tool" and message.tool_call_id not in call_ids:
            _wrong(f"messages[{index}].tool_call_id", "names no call in front of it: send the call too", "invalid_value")
    check_length("messages", sum(map(_num_chars, turns)), settings)
    return turns


def predicted_text(prediction: Prediction | None) -> str | None:
    """The text of a prediction."""
    if prediction is None or isinstance(prediction.content, str):
        return None if prediction is None else str(prediction.content)
    return "".join(_text("prediction", part) for part in prediction.content)


def _turn(index: int, message: Message) -> dict[str, Any]:
    place = f"messages[{index}]"
    if message.role == "function" or message.function_call:
        _refuse(f"{place}.{'role' if message.role == 'function' else 'function_call'}", _OLD)
    if message.audio:
        _refuse(f"{place}.audio", _TEXT_ONLY)
    of_roles = {"tool_calls": "assistant", "tool_call_id": "tool", "reasoning_content": "assistant", "reasoning": "assistant"}
    for name, role in of_roles.items():
        if getattr(message, name) and message.role != role:
            _wrong(f"{place}.{name}", f"belongs to the role {role}, and the message is of {message.role}: leave it out", "invalid_value")
    if message.role == "tool" and not message.tool_call_id:
        _wrong(f"{place}.tool_call_id", "is missing: send the id of the call whose result it is", "missing_required_parameter")
    if message.content is None and not message.tool_calls:
        _wrong(f"{place}.content", "is missing: send a text", "missing_required_parameter")
    content = message.content
    if content is not None and not isinstance(content, str):
        content = [{"type": "text", "text": _text(f"{place}.content", part)} for part in content]
    turn = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content,
        "name": message.name,
        "tool_calls": [call.as_template() for call in message.tool_calls or []] or None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    return {name: value for name, value in turn.items() if value is not None}


def _text(name: str, part: Mapping[str, Any]) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        _refuse(name, f"a part of it is not of the type text, and {_TEXT_ONLY}")
    if not isinstance(text, str):
        raise HttpError(400, f"{name} has a part without a text: send it", parameter=name, code="invalid_value")
    return text


def _num_chars(turn: Mapping[str, Any]) -> int:
    content = turn.get("content", "")
    num_chars = len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
    for call in turn.get("tool_calls", ()):
        num_chars += len(call["function"]["arguments"])
    return num_chars + len(turn.get("reasoning_content", ""))


def _wrong(name: str, problem: str, code: str) -> NoReturn:
    raise HttpError(400, f"{name} {problem}", parameter=name, code=code)


def _refuse(name: str, reason: str) -> NoReturn:
    raise HttpError(400, f"{name} is not served: {reason}", parameter=name, code="unsupported_parameter")
