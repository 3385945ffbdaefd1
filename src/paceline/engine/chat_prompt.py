"""Builds the token ids of a prompt from a conversation, and parses the conversation's outputs.

The chat template renders the conversation. If it rejects the conversation, or omits a system message or the tools, the conversation is
changed as little as is needed (`chat_messages`). Control tokens that a message spells out remain ordinary text
(`tokenizer/control_text.py`).
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from paceline.engine.chat_messages import (
    Adaptation,
    Message,
    arguments_as_text,
    as_tools,
    has_calls,
    template_messages,
    template_tool,
    typed_tool,
    with_folded_later_system,
    with_folded_system,
    with_generic_tools,
    with_merged_turns,
    with_plain_texts,
    with_sequential_calls,
    with_short_call_ids,
    with_texts_in_reasoning,
)
from paceline.engine.inputs import Messages
from paceline.errors import RequestError
from paceline.outputs import RequestOutput
from paceline.parsing.parse_output import ParsedOutput
from paceline.parsing.registry import GENERIC, OutputFormat, OutputStream
from paceline.parsing.tool_calls.generic import generic_tool_prompt
from paceline.parsing.tools import Tool
from paceline.tokenizer.control_text import strings_in
from paceline.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:  # import cycle: the input processor builds prompts with this module
    from paceline.engine.input_processor import InputProcessor

RESERVED_OPTIONS = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that have arguments of their own in `chat_prompt`."""

FOLDED_SYSTEM = "this model's chat template has no system role here: system messages are written at the beginning of a user message"
GENERIC_TOOLS = "this model's chat template does not support tools: they are described in the system message, and calls are written as JSON"

_ADAPTATIONS: tuple[Adaptation, ...] = (
    arguments_as_text,
    with_short_call_ids,
    with_sequential_calls,
    with_texts_in_reasoning,
    with_merged_turns,
    with_folded_system,
)
_NEED_CONTENT = ("system", "developer", "user")
"""Roles whose messages are nothing but their content."""
_MAX_RETRY_SECONDS = 1.0
_NUM_PROMPT_TAIL_TOKENS = 16  # last prompt tokens that are searched for an opened reasoning section
_SEARCHED = re.compile(r"""(?:split|partition|find|index)\(\s*(?:'([^']+)'|"([^"]+)")|(?:'([^']+)'|"([^"]+)")\s+(?:not\s+)?in\s""")
_FIRST_PROBE, _LATER_PROBE, _DEVELOPER_PROBE = "firstsystemprobe", "latersystemprobe", "developerprobe"
_USER, _ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """The prompt of a conversation.

    Attributes:
        token_ids: the prompt.
        notices: descriptions of the changes that made the template render the whole conversation.
        uses_generic_tools: whether the system message describes the tools, so that calls have the generic format.
    """

    token_ids: list[int]
    notices: tuple[str, ...] = ()
    uses_generic_tools: bool = False


@dataclass(frozen=True, slots=True)
class ChatOutputParser:
    """Splits the text of one conversation's outputs into content, reasoning and tool calls.

    Attributes:
        formats: formats of the model's tool calls and reasoning.
        tools: functions in the prompt.
        in_reasoning: whether the prompt has opened reasoning.
    """

    formats: OutputFormat
    tools: tuple[Tool, ...] = ()
    in_reasoning: bool = False

    @classmethod
    def for_prompt(cls, tokenizer: Tokenizer, formats: OutputFormat, prompt: ChatPrompt, tools: Sequence[Tool]) -> "ChatOutputParser":
        """Return the parser for the outputs of a prompt."""
        if prompt.uses_generic_tools:
            formats = replace(formats, tool_call_parser=GENERIC)
        tail = tokenizer.decode(prompt.token_ids[-_NUM_PROMPT_TAIL_TOKENS:], skip_special_tokens=False)
        return cls(formats, tuple(tools), formats.has_opened_reasoning(tail))

    def shown_token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Return the special tokens whose texts the parser needs to see."""
        ids = [tokenizer.added_token_id(text) for text in self.formats.tokens(self.tools)]
        return [token_id for token_id in ids if token_id is not None]

    def stream(self, *, sample: int = 0, several: bool = True) -> OutputStream:
        """Return a parser for the streamed text of one sample."""
        return self.formats.stream(self.tools, sample=sample, several=several, in_reasoning=self.in_reasoning)

    def parsed(self, output: RequestOutput) -> RequestOutput:
        """Return a finished output with content, reasoning and tool calls parsed from its text."""
        stream = self.stream(sample=output.sample_index)
        events = [*stream.push(output.text), *stream.finish()]
        found = ParsedOutput.of_events(events, stream.sink.broken_off)
        return replace(output, content=found.content, reasoning=found.reasoning, tool_calls=found.tool_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversation:
    """A conversation with the options to render it."""

    input_processor: "InputProcessor"
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    add_generation_prompt: bool
    continues: bool
    allow_special_tokens: bool
    notices: tuple[str, ...] = ()

    @property
    def template(self) -> str:
        return self.input_processor.tokenizer.template_source(has_tools=bool(self.tools))

    def text(self, messages: Sequence[Message]) -> str:
        return self.input_processor.tokenizer.chat_text(
            messages,
            tools=self.tools,
            options=self.options,
            add_generation_prompt=self.add_generation_prompt and not self.continues,
            max_model_len=self.input_processor.max_model_len,
        )


def chat_prompt(
    input_processor: "InputProcessor",
    messages: Messages,
    *,
    tools: Sequence[Tool | Mapping[str, Any]] = (),
    template_options: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    allow_special_tokens: bool = False,
) -> ChatPrompt:
    """Build the prompt of a conversation. It takes too long for an event loop.

    Args:
        tools: functions that may be called.
        template_options: further variables of the chat template, such as {"enable_thinking": False}.
        add_generation_prompt: whether the assistant's turn is begun.
        continue_final_message: whether the prompt ends with the text of the last message, an assistant's, which the output continues.
            Then no turn is begun.
        allow_special_tokens: whether control tokens in the text of messages are encoded as control tokens.

    Raises:
        RequestError: the conversation is empty, too long or malformed, or the template rejects it.
        BackendUnavailableError: the template cannot be rendered here.
    """
    described = as_tools(tools)
    plain = _checked_messages(input_processor, messages, [described, template_options], continue_final_message=continue_final_message)
    check_template_options(input_processor.tokenizer, template_options or {})
    conversation = _Conversation(
        input_processor=input_processor,
        messages=template_messages(plain, has_developer_role=_has_developer_role(input_processor.tokenizer, plain)),
        tools=[template_tool(tool) for tool in described],
        options=template_options or {},
        add_generation_prompt=add_generation_prompt,
        continues=continue_final_message,
        allow_special_tokens=allow_special_tokens,
    )
    takes_tools = input_processor.tokenizer.template_uses("tools") or not (described or has_calls(plain))
    if takes_tools:
        prompt, text = _render_and_encode(conversation)
        if all(tool.name in text for tool in described):
            return _log_notices(input_processor, prompt)
    messages = with_generic_tools(conversation.messages, generic_tool_prompt(described) if described else "")
    prompt, _ = _render_and_encode(replace(conversation, messages=messages, tools=(), notices=(GENERIC_TOOLS,)))
    return _log_notices(input_processor, replace(prompt, uses_generic_tools=bool(described)))


def check_template_options(tokenizer: Tokenizer, options: Mapping[str, Any]) -> None:
    """Check that the chat template reads each option.

    Raises:
        RequestError: it does not read one; `parameter` is "template_options".
    """
    for name in options:
        if name in RESERVED_OPTIONS or not tokenizer.template_uses(name):
            raise RequestError(f"{name} is no option of this model's chat template: leave it out", parameter="template_options")


def _checked_messages(
    input_processor: "InputProcessor", messages: Messages, others: Sequence[Any], *, continue_final_message: bool
) -> Messages:
    """Check the number, the form and the length of messages, and return them with plain strings as contents.

    Lengths are checked before anything is rendered or encoded, so that too long a conversation is refused quickly.

    Args:
        others: tools and options, whose strings count towards the length.

    Raises:
        RequestError: a check failed.
    """
    if not hasattr(messages, "__len__") or isinstance(messages, str | Mapping):
        raise RequestError(f"messages is {messages!r}: give a list of {{'role', 'content'}}", parameter="messages")
    if not messages:
        raise RequestError("messages is empty: send at least one message", parameter="messages")
    input_processor.check_num_messages(len(messages))
    plain = with_plain_texts(messages)
    for index, one in enumerate(plain):
        _check_message(index, one)
    try:
        input_processor.check_num_chars(sum(map(len, strings_in([*plain, *others]))))
    except RecursionError:
        raise RequestError("messages or tools are nested too deeply: send them flatter", parameter="messages") from None
    last = plain[-1]
    if continue_final_message and (last.get("role") != "assistant" or last.get("tool_calls") or not isinstance(last.get("content"), str)):
        raise RequestError(
            "continue_final_message continues the text of an assistant, and the last message is none: send one with a text and no calls",
            parameter="continue_final_message",
        )
    return plain


def _check_message(index: int, message: object) -> None:
    if not isinstance(message, Mapping):
        raise RequestError(f"messages holds {message!r}: give {{'role', 'content'}}", parameter="messages")
    if message.get("role") in _NEED_CONTENT and message.get("content") is None:
        raise RequestError(f"messages[{index}].content is missing: give a text", parameter=f"messages[{index}].content")


def _render_and_encode(conversation: _Conversation) -> tuple[ChatPrompt, str]:
    """Render and encode a conversation; return the prompt, and its text before encoding."""
    conversation = _with_shown_system(conversation)
    tokenizer, template = conversation.input_processor.tokenizer, conversation.template
    given: list[Any] = [*conversation.messages, list(conversation.tools), dict(conversation.options)]
    kept = _searched_marks(conversation.messages, template)
    escaped = tokenizer.control_texts.escape(given, others=[template], except_in=kept)
    is_escaped = escaped.is_needed and not conversation.allow_special_tokens
    *messages, tools, options = escaped.value if is_escaped else given
    end = escaped.placeholders.take_unused(1) if conversation.continues else ""
    if end:
        messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{end} "}
    text, notices = _render_accepted(replace(conversation, messages=messages, tools=tools, options=options))
    if end:
        text = _text_before_mark(text, end)
    conversation.input_processor.check_num_chars(len(text))
    if is_escaped:
        text = escaped.unescape_json(text)
        ids = tokenizer.control_texts.encode(escaped, text)
        text = escaped.restore(text)
    else:
        ids = tokenizer.encode(text, add_special_tokens=False)
    return ChatPrompt(token_ids=ids, notices=(*conversation.notices, *notices)), text


def _text_before_mark(text: str, end: str) -> str:
    """Return the text before `end`, the mark that was added to the last message.

    If the template strips that message, white space before the mark is removed as well.

    Raises:
        RequestError: the text does not contain the mark.
    """
    index = text.rfind(end)
    if index < 0:
        raise RequestError(
            "continue_final_message: this model's chat template does not show the text of the last message; send it as a finished message",
            parameter="continue_final_message",
        )
    return text[:index] if text[index + 1 : index + 2] == " " else text[:index].rstrip()


def _has_developer_role(tokenizer: Tokenizer, messages: Messages) -> bool:
    """Return whether the template renders the role "developer". True if no message has this role."""
    if not any(message.get("role") == "developer" for message in messages):
        return True
    probe = {"role": "developer", "content": _DEVELOPER_PROBE}
    return tokenizer.template_uses("developer") and tokenizer.template_renders([_DEVELOPER_PROBE], [probe, _USER])


def _with_shown_system(conversation: _Conversation) -> _Conversation:
    """Return the conversation with system messages moved into user messages, if the template does not render them."""
    messages, tokenizer, has_tools = conversation.messages, conversation.input_processor.tokenizer, bool(conversation.tools)
    if not any(message.get("role") in ("system", "developer") for message in messages):
        return conversation
    changed = None
    first, later = ({"role": "system", "content": probe} for probe in (_FIRST_PROBE, _LATER_PROBE))
    if not tokenizer.template_renders([_FIRST_PROBE], [first, _USER], has_tools=has_tools):
        changed = with_folded_system([{**one, "role": "system"} if one.get("role") == "developer" else one for one in messages])
    elif (folded := with_folded_later_system(messages)) != messages:
        both = [first, _USER, _ASSISTANT, later, _USER]
        changed = None if tokenizer.template_renders([_FIRST_PROBE, _LATER_PROBE], both, has_tools=has_tools) else folded
    if changed is not None:
        return replace(conversation, messages=changed, notices=(*conversation.notices, FOLDED_SYSTEM))
    return conversation


def _render_accepted(conversation: _Conversation) -> tuple[str, tuple[str, ...]]:
    """Render the conversation, changed as little as the template needs; return the text and the notices of the changes.

    Raises:
        RequestError: the template rejects every variant; the error is that of the unchanged conversation.
    """
    started_s, first_error = time.monotonic(), None
    for changed, chosen in _adapted_variants(conversation):
        try:
            text = changed.text(changed.messages)
        except RequestError as error:
            first_error = first_error or error
            if time.monotonic() - started_s > _MAX_RETRY_SECONDS:  # a template that exceeds its time limit would do so for each variant
                break
            continue
        if arguments_as_text not in chosen and _has_python_repr_arguments(changed.messages, text):
            text = changed.text(arguments_as_text(changed.messages))
        if with_folded_system not in chosen and not _has_all_system_messages(changed.messages, text):
            folded = with_folded_system(changed.messages)
            with suppress(RequestError):
                return changed.text(folded), (FOLDED_SYSTEM,)
        return text, ((FOLDED_SYSTEM,) if with_folded_system in chosen else ())
    assert first_error is not None
    raise first_error


def _has_all_system_messages(messages: Sequence[Message], text: str) -> bool:
    """Return whether a rendered prompt has all system messages. Mistral Nemo's template needs a user message at the end for that."""
    return all(str(one.get("content") or "").strip() in text for one in messages if one.get("role") == "system")


def _adapted_variants(conversation: _Conversation) -> Iterator[tuple[_Conversation, Sequence[Adaptation]]]:
    """Yield the distinct variants of a conversation with their changes, those with the fewest changes first."""
    typed = [typed_tool(tool) for tool in conversation.tools]
    forms = [conversation.tools] if typed == conversation.tools else [conversation.tools, typed]
    tried: list[Sequence[Message]] = []
    for count in range(len(_ADAPTATIONS) + 1):
        for chosen in combinations(_ADAPTATIONS, count):
            messages: Sequence[Message] = conversation.messages
            for change in chosen:
                messages = change(messages)
            if messages not in tried:
                tried.append(messages)
                yield from ((replace(conversation, messages=messages, tools=tools), chosen) for tools in forms)


def _has_python_repr_arguments(messages: Sequence[Message], text: str) -> bool:
    """Return whether the template wrote arguments as Python's repr, with single quotes, instead of JSON."""
    arguments = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or ()]
    return any(f"{given}" in text for given in arguments if isinstance(given, dict) and f"{given}".startswith("{'"))


def _searched_marks(messages: Sequence[Message], template: str) -> dict[int, list[str]]:
    """Return the texts that the template searches for in assistant messages, such as "</think>", by index of the message."""
    marks = [found[1] or found[2] or found[3] or found[4] for found in _SEARCHED.finditer(template)]
    return {index: marks for index, message in enumerate(messages) if marks and message.get("role") == "assistant"}


def _log_notices(input_processor: "InputProcessor", prompt: ChatPrompt) -> ChatPrompt:
    """Log the notices of a prompt, and return the prompt."""
    for notice in prompt.notices:
        input_processor.notify(notice)
    return prompt
