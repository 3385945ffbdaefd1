"""A conversation to be answered, whatever dialect it came in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.chat_prompt import ChatPrompt, PromptLimits, chat_prompt
from paceline.engine.inputs import Messages, RequestOptions
from paceline.parsing.tools import Tool, ToolUse
from paceline.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a dialect asks for.

    Attributes:
        messages: as chat templates know them: `role` and `content`, of answers `tool_calls` ({"id", "type", "function": {"name",
            "arguments"}}) and `reasoning_content`, of tools' results `role: "tool"`, `tool_call_id` and `name`.
        tools: those that may be called.
        tool_use: whether they are.
        tool_name: the only one that may be called, where calls are required; None = any.
        parallel_tool_calls: whether there may be several calls in one answer.
        template_options: what the chat template is told besides, such as {"enable_thinking": False}.
        add_generation_prompt: whether the assistant's turn is begun.
        continue_final_message: whether the output continues the last message, an assistant's.
        allow_special_tokens: whether control tokens that the messages spell out are control tokens.
        takes_the_rest: whether `params.max_tokens` gives way to what the context holds behind the prompt.
    """

    messages: Messages
    tools: Sequence[Tool] = ()
    tool_use: ToolUse = ToolUse.AUTO
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    params: SamplingParams
    options: RequestOptions = field(default_factory=lambda: RequestOptions())
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    allow_special_tokens: bool = False
    takes_the_rest: bool = False

    @property
    def offered_tools(self) -> Sequence[Tool]:
        """The tools that the model is told of."""
        return () if self.tool_use is ToolUse.NONE else self.tools

    def prompt(self, limits: PromptLimits) -> ChatPrompt:
        """The conversation as the model reads it. It takes time: not for the event loop.

        Raises:
            RequestError, BackendUnavailableError: as `chat_prompt`.
        """
        return chat_prompt(
            limits,
            self.messages,
            tools=self.offered_tools,
            template_options=self.template_options,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            allow_special_tokens=self.allow_special_tokens,
        )
