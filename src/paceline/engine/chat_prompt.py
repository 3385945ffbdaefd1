"""From a conversation to the token ids of its prompt.

The chat template decides how a conversation is written. Where it rejects one, or leaves out a system message or the tools, the
conversation is changed as little as is needed (`chat_messages`). Control tokens that a text of the conversation spells out stay text
(`tokenizer/control_text.py`).
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Protocol

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
    with_sequential_calls,
    with_short_call_ids,
    with_texts_in_reasoning,
)
from paceline.engine.inputs import Messages, with_plain_texts
from paceline.errors import RequestError
from paceline.parsing.tool_calls.generic import generic_tool_prompt
from paceline.parsing.tools import Tool
from paceline.tokenizer.control_text import strings_in
from paceline.tokenizer.tokenizer import Tokenizer

RESERVED_OPTIONS = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that are arguments of their own here."""

FOLDED_SYSTEM = "this model's chat template has no system role here: system messages are written at the beginning of a user message"
GENERIC_TOOLS = "this model's chat template knows no tools: they are described in the system message, and calls are written as JSON"

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
_SEARCHED = re.compile(r"""(?:split|partition|find|index)\(\s*(?:'([^']+)'|"([^"]+)")|(?:'([^']+)'|"([^"]+)")\s+(?:not\s+)?in\s""")
_FIRST_PROBE, _LATER_PROBE, _DEVELOPER_PROBE = "firstsystemprobe", "latersystemprobe", "developerprobe"
_USER, _ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


class PromptLimits(Protocol):
    """The tokenizer of a target, and how long its prompts may be."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_context(self) -> int: ...

    def check_num_chars(self, num_chars: int) -> None:
        """Raises RequestError: a text of so many characters has more tokens than the context."""

    def check_num_messages(self, num_messages: int) -> None:
        """Raises RequestError: so many messages have more tokens than the context."""

    def notify(self, notice: str) -> None:
        """Report a notice, once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation as a model reads it.

    Attributes:
        token_ids: the prompt.
        notices: what was changed so that the template shows everything.
        uses_generic_tools: whether tools were described in a generic way, so that calls are to be read in the generic form.
    """

    token_ids: list[int]
    notices: tuple[str, ...] = ()
    uses_generic_tools: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversation:
    """What is rendered, and how."""

    limits: PromptLimits
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    add_generation_prompt: bool
    continues: bool
    allow_special_tokens: bool
    notices: tuple[str, ...] = ()

    @property
    def template(self) -> str:
        return self.limits.tokenizer.template_source(has_tools=bool(self.tools))

    def text(self, messages: Sequence[Message]) -> str:
        return self.limits.tokenizer.chat_text(
            messages,
            tools=self.tools,
            options=self.options,
            add_generation_prompt=self.add_generation_prompt and not self.continues,
            max_context=self.limits.max_context,
        )


def chat_prompt_ids(limits: PromptLimits, messages: Messages, **options: Any) -> list[int]:
    """The token ids of a conversation; arguments and errors as for `chat_prompt`."""
    return chat_prompt(limits, messages, **options).token_ids


def chat_prompt(
    limits: PromptLimits,
    messages: Messages,
    *,
    tools: Sequence[Tool | Mapping[str, Any]] = (),
    template_options: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    allow_special_tokens: bool = False,
) -> ChatPrompt:
    """The prompt of a conversation. It takes time: not for an event loop.

    Args:
        limits: a `RequestMaker`.
        tools: functions that may be called.
        template_options: further variables of the chat template, such as {"enable_thinking": False}.
        add_generation_prompt: whether the assistant's turn is begun.
        continue_final_message: whether the prompt ends with the text of the last message, an assistant's, which the output continues.
            Then no turn is begun.
        allow_special_tokens: whether control tokens that the messages spell out are control tokens.

    Raises:
        RequestError: the conversation is empty, too long or malformed, or the template rejects it.
        BackendUnavailableError: the template cannot be rendered here.
    """
    described = as_tools(tools)
    plain = _checked(limits, messages, [described, template_options], continue_final_message=continue_final_message)
    check_template_options(limits.tokenizer, template_options or {})
    conversation = _Conversation(
        limits=limits,
        messages=template_messages(plain, knows_developer=_knows_developer(limits.tokenizer, plain)),
        tools=[template_tool(tool) for tool in described],
        options=template_options or {},
        add_generation_prompt=add_generation_prompt,
        continues=continue_final_message,
        allow_special_tokens=allow_special_tokens,
    )
    knows_tools = limits.tokenizer.template_takes("tools") or not (described or has_calls(plain))
    if knows_tools:
        prompt, text = _rendered(conversation)
        if all(tool.name in text for tool in described):
            return _reported(limits, prompt)
    messages = with_generic_tools(conversation.messages, generic_tool_prompt(described) if described else "")
    prompt, _ = _rendered(replace(conversation, messages=messages, tools=(), notices=(GENERIC_TOOLS,)))
    return _reported(limits, replace(prompt, uses_generic_tools=bool(described)))


def check_template_options(tokenizer: Tokenizer, options: Mapping[str, Any]) -> None:
    """Check that the chat template has a use for each option.

    Raises:
        RequestError: it has none for one; `parameter` is "template_options".
    """
    for name in options:
        if name in RESERVED_OPTIONS or not tokenizer.template_takes(name):
            raise RequestError(f"{name} is no option of this model's chat template: leave it out", parameter="template_options")


def _checked(limits: PromptLimits, messages: Messages, others: Sequence[Any], *, continue_final_message: bool) -> Messages:
    """The messages with plain texts, after a check of their number and length, which takes little time however long they are."""
    if not hasattr(messages, "__len__") or isinstance(messages, str | Mapping):
        raise RequestError(f"messages is {messages!r}: give a list of {{'role', 'content'}}", parameter="messages")
    if not messages:
        raise RequestError("messages is empty: send at least one message", parameter="messages")
    limits.check_num_messages(len(messages))
    plain = with_plain_texts(messages)
    for index, one in enumerate(plain):
        _check_message(index, one)
    try:
        limits.check_num_chars(sum(map(len, strings_in([*plain, *others]))))
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


def _rendered(conversation: _Conversation) -> tuple[ChatPrompt, str]:
    """The prompt, and its text."""
    conversation = _with_shown_system(conversation)
    tokenizer, template = conversation.limits.tokenizer, conversation.template
    given: list[Any] = [*conversation.messages, list(conversation.tools), dict(conversation.options)]
    kept = _searched_marks(conversation.messages, template)
    escaped = tokenizer.control_texts.escaped(given, others=[template], except_in=kept)
    is_escaped = escaped.is_needed and not conversation.allow_special_tokens
    *messages, tools, options = escaped.value if is_escaped else given
    end = escaped.placeholders.unused(1) if conversation.continues else ""
    if end:
        messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{end} "}
    text, notices = _accepted_text(replace(conversation, messages=messages, tools=tools, options=options))
    if end:
        text = _cut_after(text, end)
    conversation.limits.check_num_chars(len(text))
    if is_escaped:
        text = escaped.normalized(text)
        ids = tokenizer.control_texts.encode(escaped, text)
        text = escaped.restored(text)
    else:
        ids = tokenizer.encode(text, add_special_tokens=False)
    return ChatPrompt(token_ids=ids, notices=(*conversation.notices, *notices)), text


def _cut_after(text: str, end: str) -> str:
    """The text up to the mark that was added to the last message; where the template strips that message, its last spaces go too."""
    index = text.rfind(end)
    if index < 0:
        raise RequestError(
            "continue_final_message: this model's chat template does not show the text of the last message; send it as a finished message",
            parameter="continue_final_message",
        )
    return text[:index] if text[index + 1 : index + 2] == " " else text[:index].rstrip()


def _knows_developer(tokenizer: Tokenizer, messages: Messages) -> bool:
    """Whether the template shows messages of developers; True where there are none."""
    if not any(message.get("role") == "developer" for message in messages):
        return True
    probe = {"role": "developer", "content": _DEVELOPER_PROBE}
    return tokenizer.template_takes("developer") and tokenizer.template_shows([_DEVELOPER_PROBE], [probe, _USER])


def _with_shown_system(conversation: _Conversation) -> _Conversation:
    """The same with system messages in user messages where the template would leave them out."""
    messages, tokenizer, has_tools = conversation.messages, conversation.limits.tokenizer, bool(conversation.tools)
    if not any(message.get("role") in ("system", "developer") for message in messages):
        return conversation
    changed = None
    first, later = ({"role": "system", "content": probe} for probe in (_FIRST_PROBE, _LATER_PROBE))
    if not tokenizer.template_shows([_FIRST_PROBE], [first, _USER], has_tools=has_tools):
        changed = with_folded_system([{**one, "role": "system"} if one.get("role") == "developer" else one for one in messages])
    elif (folded := with_folded_later_system(messages)) != messages:
        both = [first, _USER, _ASSISTANT, later, _USER]
        changed = None if tokenizer.template_shows([_FIRST_PROBE, _LATER_PROBE], both, has_tools=has_tools) else folded
    if changed is not None:
        return replace(conversation, messages=changed, notices=(*conversation.notices, FOLDED_SYSTEM))
    return conversation


def _accepted_text(conversation: _Conversation) -> tuple[str, tuple[str, ...]]:
    """The text of the conversation, changed as little as the template needs, and the notices of these changes.

    Raises:
        RequestError: the template rejects it in every form; the error is that of the conversation as it was given.
    """
    started_s, first_error = time.monotonic(), None
    for changed, chosen in _variants(conversation):
        try:
            text = changed.text(changed.messages)
        except RequestError as error:
            first_error = first_error or error
            if time.monotonic() - started_s > _MAX_RETRY_SECONDS:  # it exceeds its limits, which takes as long each time
                break
            continue
        if arguments_as_text not in chosen and _shows_python(changed.messages, text):
            text = changed.text(arguments_as_text(changed.messages))
        if with_folded_system not in chosen and not _shows_system(changed.messages, text):
            folded = with_folded_system(changed.messages)
            with suppress(RequestError):
                return changed.text(folded), (FOLDED_SYSTEM,)
        return text, ((FOLDED_SYSTEM,) if with_folded_system in chosen else ())
    assert first_error is not None
    raise first_error


def _shows_system(messages: Sequence[Message], text: str) -> bool:
    """Whether a prompt has all system messages: some templates show them only before a user message at the end (Mistral Nemo)."""
    return all(str(one.get("content") or "").strip() in text for one in messages if one.get("role") == "system")


def _variants(conversation: _Conversation) -> Iterator[tuple[_Conversation, Sequence[Adaptation]]]:
    """The conversation with more and more changes, each variant once, and the changes."""
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


def _shows_python(messages: Sequence[Message], text: str) -> bool:
    """Whether arguments are written as Python writes objects, with quotes that JSON has not."""
    arguments = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or ()]
    return any(f"{given}" in text for given in arguments if isinstance(given, dict) and f"{given}".startswith("{'"))


def _searched_marks(messages: Sequence[Message], template: str) -> dict[int, list[str]]:
    """By index of an assistant's message, the texts in it that the template itself searches for, such as the end of thoughts."""
    marks = [found[1] or found[2] or found[3] or found[4] for found in _SEARCHED.finditer(template)]
    return {index: marks for index, message in enumerate(messages) if marks and message.get("role") == "assistant"}


def _reported(limits: PromptLimits, prompt: ChatPrompt) -> ChatPrompt:
    for notice in prompt.notices:
        limits.notify(notice)
    return prompt
