"""The fields of OpenAI's responses, and what of them is refused."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from paceline.server.fields import Fields, SamplingFields
from paceline.server.http_errors import HttpError
from paceline.server.wrong_fields import shown

_STORED = "nothing is stored: send the whole conversation as input"
_ELSEWHERE = "ask /v1/chat/completions for log-probabilities"
_TAKEN = "reasoning.encrypted_content"  # reasoning is sent as it is
_NO_TOOLS = "this server has no tools of its own"
_NOT_INCLUDED = {
    "message.output_text.logprobs": _ELSEWHERE,
    "message.input_image.image_url": "this server reads and writes text only",
    "file_search_call.results": _NO_TOOLS,
    "web_search_call.results": _NO_TOOLS,
    "web_search_call.action.sources": _NO_TOOLS,
    "computer_call_output.output.image_url": _NO_TOOLS,
    "code_interpreter_call.outputs": _NO_TOOLS,
}


class StreamOptions(Fields):
    """How an answer is streamed."""

    include_obfuscation: Literal[False] | None = None


class Format(Fields):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class Text(Fields):
    """What the text must be. The verbosity "medium" is OpenAI's default; others the model would have to be told in a message."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Fields):
    """How much is thought. It is sent as it is, so that no `summary` is made."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class Tool(Fields):
    """A function that the model may call."""

    refused: ClassVar[Mapping[str, str]] = {"defer_loading": "the model is told of every tool at once"}

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ResponsesFields(SamplingFields):
    """The body of `/v1/responses`. Fields that say nothing about the text (`user`, `metadata`) are taken and not used."""

    refused: ClassVar[Mapping[str, str]] = {
        "store": _STORED,
        "previous_response_id": _STORED,
        "conversation": _STORED,
        "prompt": _STORED,
        "background": "answers are not kept for later: stream them",
        "top_logprobs": _ELSEWHERE,
        "moderation": "this server reaches no other one",
        "context_management": "nothing is left out of a conversation: send what the model shall see",
    }

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    truncation: Literal["disabled"] | None = None
    store: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None
    top_logprobs: Any = None
    moderation: Any = None
    context_management: Any = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    def check_refused(self, within: str = "") -> None:
        if self.top_logprobs == 0:
            self.top_logprobs = None
        super().check_refused(within)
        if self.stream_options is not None and not self.stream:
            raise HttpError(400, "stream_options are for streams: send stream=true, or leave them out", parameter="stream_options")
        for place, name in enumerate(self.include or []):
            if name != _TAKEN:
                reason = _NOT_INCLUDED.get(name, f"send {_TAKEN}, or leave it out")
                at = f"include[{place}]"
                text = f"{at} is {shown(name)}, which is not served: {reason}"
                raise HttpError(400, text, parameter=at, code="unsupported_parameter")
