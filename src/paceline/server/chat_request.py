"""A conversation to answer, in the form that all dialects share, and what dialects build it from."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.chat_prompt import ChatPrompt, chat_prompt
from paceline.engine.input_processor import InputProcessor
from paceline.engine.inputs import Messages, RequestOptions
from paceline.errors import RequestError
from paceline.parsing.tools import Tool, ToolUse
from paceline.sampling.params import SamplingParams
from paceline.server.errors import check_count, invalid
from paceline.server.settings import ServerSettings

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat request, in the same form for all API dialects.

    Attributes:
        messages: as chat templates know them: `role` and `content`, of answers `tool_calls` ({"id", "type", "function": {"name",
            "arguments"}}) and `reasoning_content`, of tools' results `role: "tool"`, `tool_call_id` and `name`.
        tools: those that may be called.
        tool_use: whether they are.
        tool_name: the only one that may be called, where calls are required; None = any.
        parallel_tool_calls: whether there may be several calls in one answer.
        template_options: further variables of the chat template, such as {"enable_thinking": False}.
        add_generation_prompt: whether the prompt begins the model's turn.
        continue_final_message: whether the last message is left open, so that the answer continues its text.
        allow_special_tokens: whether control tokens that the messages spell out are control tokens.
        fills_context: whether `params.max_tokens` is replaced by the rest of the context after the prompt.
    """

    messages: Messages
    tools: Sequence[Tool] = ()
    tool_use: ToolUse = ToolUse.AUTO
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    allow_special_tokens: bool = False
    params: SamplingParams
    options: RequestOptions = field(default_factory=lambda: RequestOptions())
    fills_context: bool = False

    @property
    def offered_tools(self) -> Sequence[Tool]:
        """The tools that the prompt lists."""
        return () if self.tool_use is ToolUse.NONE else self.tools

    def prompt(self, input_processor: InputProcessor) -> ChatPrompt:
        """Return the conversation as the model reads it, with the errors of `chat_prompt`. Slow: call it in a thread."""
        return chat_prompt(
            input_processor,
            self.messages,
            tools=self.offered_tools,
            template_options=self.template_options,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            allow_special_tokens=self.allow_special_tokens,
        )


class Turns:
    """Collects a conversation. Consecutive parts of one role are one turn; an answer's reasoning, texts and calls are one turn too."""

    def __init__(self) -> None:
        self._turns: list[dict[str, Any]] = []
        self._pending: list[tuple[str, str]] = []  # ids and names of calls without a result
        self._call_names: dict[str, str] = {}

    def add_text(self, role: str, texts: Iterable[str]) -> None:
        """Append texts to the message of a role: "system", "user" or "assistant"."""
        self._turn(role)["content"] += [{"type": "text", "text": text} for text in texts]

    def add_reasoning(self, text: str) -> None:
        """Add reasoning that precedes an answer's next text."""
        turn = self._turn("assistant")
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def add_call(self, call_id: str | None, name: str, arguments: str | dict[str, Any]) -> None:
        """Add a call to an answer.

        Args:
            call_id: None = a new one.
            arguments: an object or its JSON text.
        """
        call_id = call_id or f"call_{len(self._turns)}_{len(self._pending)}"
        function = {"name": name, "arguments": arguments}
        self._turn("assistant").setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._call_names[call_id] = name
        self._pending.append((call_id, name))

    def add_result(self, call_id: str | None, name: str | None, texts: Iterable[str]) -> None:
        """Add the result of a call.

        Without an id it belongs to the next pending call of that tool, or of any. A result whose call is not in the conversation is kept
        as it is: agents cut old turns off, and most chat templates can render it.
        """
        for call in self._pending:
            if call_id == call[0] if call_id else name in (None, call[1]):
                self._pending.remove(call)
                call_id = call[0]
                break
        turn: dict[str, Any] = {"role": "tool", "tool_call_id": call_id or ""}
        if known := self._call_names.get(call_id or "", name):
            turn["name"] = known
        self._turns.append({**turn, "content": [{"type": "text", "text": text} for text in texts]})

    @property
    def last(self) -> Mapping[str, Any] | None:
        """The last turn."""
        return self._turns[-1] if self._turns else None

    def drop_last(self) -> None:
        """Remove the last turn."""
        self._turns.pop()

    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation. A content of one text is that text."""
        return [{**turn, "content": plain_content(turn["content"])} for turn in self._turns]

    def _turn(self, role: str) -> dict[str, Any]:
        if not self._turns or self._turns[-1]["role"] != role:
            self._turns.append({"role": role, "content": []})
        return self._turns[-1]


def plain_content(content: list[dict[str, str]]) -> str | list[dict[str, str]]:
    """A content in its simplest form: none is an empty text, which chat templates can add to."""
    if len(content) > 1:
        return content
    return content[0]["text"] if content else ""


def checked_tools(
    given: Sequence[Any] | None, settings: ServerSettings, *, within: str = "", parameters: str = "parameters"
) -> tuple[Tool, ...]:
    """The tools of a request.

    Args:
        given: the dialect's objects.
        within: the field of a tool that has its name and schema; empty = the tool itself has them.
        parameters: the dialect's name of the schema.

    Raises:
        HttpError: they are too many or too long, or a name or a schema is wrong.
    """
    check_count("tools", len(given or ()), settings.max_tools)
    found = []
    for index, outer in enumerate(given or ()):
        place, one = (f"tools[{index}].{within}", getattr(outer, within)) if within else (f"tools[{index}]", outer)
        strict = bool(getattr(one, "strict", False))
        schema_place = f"{place}.{parameters}"
        tool = Tool(name=one.name, description=one.description, parameters=getattr(one, parameters), strict=strict, place=schema_place)
        if not _TOOL_NAME.fullmatch(tool.name):
            raise invalid(f"{place}.name", "is no name: use 1 to 128 letters, digits, dots, underscores and hyphens")
        num_chars = len(json.dumps(tool.parameters)) + len(tool.description or "")
        if num_chars > settings.max_grammar_chars:
            limit = settings.max_grammar_chars
            raise invalid(place, f"has {num_chars} characters, and may have {limit}: shorten its description and schema")
        if (tool.parameters or {}).get("type", "object") != "object":
            text = "describes no object: arguments have names; send a schema of the type object"
            raise invalid(schema_place, text)
        found.append(tool)
    return tuple(found)


def check_tools(request: ChatRequest) -> None:
    """Raise RequestError if two tools have one name, or the tool choice names none of them."""
    names = [tool.name for tool in request.tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"tools has two functions with the name {twice!r}: give each a name of its own", parameter="tools")
    if request.tool_use is ToolUse.REQUIRED and not names:
        text = "tool_choice requires a call, and there are no tools: send tools, or leave it out"
        raise RequestError(text, parameter="tool_choice")
    if request.tool_name is not None and request.tool_name not in names:
        text = f"tool_choice names the function {request.tool_name!r}, which is not among the tools: name one of them"
        raise RequestError(text, parameter="tool_choice")
