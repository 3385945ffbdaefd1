"""The fields of Anthropic's messages, and what of them is refused."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from paceline.server.fields import Fields, SamplingFields
from paceline.server.http_errors import HttpError

_KEEPS_ALL = {"type": "clear_thinking_20251015", "keep": "all"}


class Message(Fields):
    """One turn; its blocks are read by `messages.py`."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class Thinking(Fields):
    """Whether the model thinks before it answers. `budget_tokens` is taken and not used: `max_tokens` limits both together."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class Format(Fields):
    """What the text must be."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """How much is thought, and what the text must be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class ContextManagement(Fields):
    """What of a conversation the model shall not see."""

    edits: list[dict[str, Any]] | None = None


class Tool(Fields):
    """A function that the model may call. `cache_control`, `eager_input_streaming` say nothing about the text."""

    refused: ClassVar[Mapping[str, str]] = {
        "defer_loading": "the model is told of every tool at once",
        "input_examples": "chat templates have no place for them; put them into the description",
    }

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    input_examples: list[Any] | None = None


class ToolChoice(Fields):
    """Whether tools are called, and how many at once."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ConversationFields(SamplingFields):
    """What is asked for and what is counted have in common."""

    refused: ClassVar[Mapping[str, str]] = {
        "container": "this server runs nothing",
        "mcp_servers": "this server reaches no other one",
        "inference_geo": "this server is where it is",
        "diagnostics": "nothing of another request is stored",
    }

    model: str | None = None
    messages: list[Message]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = None
    speed: Literal["standard"] | None = None
    container: Any = None
    mcp_servers: Any = None
    inference_geo: Any = None
    diagnostics: Any = None

    def check_refused(self, within: str = "") -> None:
        super().check_refused(within)
        edits = [] if self.context_management is None else self.context_management.edits or []
        if any(edit != _KEEPS_ALL for edit in edits):
            raise HttpError(
                400,
                f"context_management.edits is served only as {_KEEPS_ALL}: leave out yourself what the model shall not see",
                parameter="context_management.edits",
                code="unsupported_parameter",
            )


class MessagesFields(ConversationFields):
    """The body of `/v1/messages`. `metadata` and `service_tier` say nothing about the text."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
