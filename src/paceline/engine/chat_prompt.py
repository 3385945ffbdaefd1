"""Builds the token ids of a prompt from a conversation, and parses the conversation's outputs.

The chat template renders the conversation. If the template rejects the conversation, or omits a system message or the tools, the
conversation is changed as little as needed (`chat_messages`). If the text of a message contains the spelling of a control token, such as
"<|im_end|>", it is encoded as ordinary text (`tokenizer/control_text.py`).
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from paceline.engine.chat_messages import (
    Message,
    MessagesAdaptation,
    has_tool_calls,
    messages_for_template,
    parse_tools,
    tool_for_template,
    tool_with_types,
    with_arguments_as_text,
    with_content_in_reasoning,
    with_generic_tools,
    with_later_system_as_user_text,
    with_merged_turns,
    with_sequential_calls,
    with_short_call_ids,
    with_string_contents,
    with_system_as_user_text,
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

RESERVED_TEMPLATE_OPTIONS = ("messages", "tools", "documents", "add_generation_prompt")
"""Template variables that `template_options` cannot set, because `chat_prompt` sets them."""

SYSTEM_AS_USER_NOTICE = "this model's chat template has no system role here: system messages are written at the beginning of a user message"
GENERIC_TOOLS_NOTICE = "this model's chat template does not support tools: the system message describes them, and calls are written as JSON"

_ADAPTATIONS: tuple[MessagesAdaptation, ...] = (
    with_arguments_as_text,
    with_short_call_ids,
    with_sequential_calls,
    with_content_in_reasoning,
    with_merged_turns,
    with_system_as_user_text,
)
_ROLES_WITH_CONTENT = ("system", "developer", "user")
"""Roles whose messages must have a content."""
_MAX_VARIANTS_S = 1.0  # after this time, no further variant of messages that the template rejected is rendered
_NUM_PROMPT_TAIL_TOKENS = 16  # number of tokens at the end of a prompt that are searched for the opening mark of reasoning
_SEARCHED_LITERAL = re.compile(r"""(?:split|partition|find|index)\(\s*(?:'([^']+)'|"([^"]+)")|(?:'([^']+)'|"([^"]+)")\s+(?:not\s+)?in\s""")
_FIRST_SYSTEM_PROBE, _LATER_SYSTEM_PROBE, _DEVELOPER_PROBE = "firstsystemprobe", "latersystemprobe", "developerprobe"
_PROBE_USER_MESSAGE, _PROBE_ASSISTANT_MESSAGE = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """The prompt of a conversation.

    Attributes:
        token_ids: the prompt.
        notices: descriptions of the changes that the template needed to render the whole conversation.
        uses_generic_tools: whether the system message describes the tools, so that the model writes calls as JSON.
    """

    token_ids: list[int]
    notices: tuple[str, ...] = ()
    uses_generic_tools: bool = False


@dataclass(frozen=True, slots=True)
class ChatOutputParser:
    """Splits the text of one conversation's outputs into content, reasoning and tool calls.

    Attributes:
        formats: formats of the model's tool calls and reasoning.
        tools: the functions that the prompt offers.
        in_reasoning: whether the prompt ends within reasoning, so that the output begins with it.
    """

    formats: OutputFormat
    tools: tuple[Tool, ...] = ()
    in_reasoning: bool = False

    @classmethod
    def for_prompt(cls, tokenizer: Tokenizer, formats: OutputFormat, prompt: ChatPrompt, tools: Sequence[Tool]) -> "ChatOutputParser":
        if prompt.uses_generic_tools:
            formats = replace(formats, tool_call_parser=GENERIC)
        tail = tokenizer.decode(prompt.token_ids[-_NUM_PROMPT_TAIL_TOKENS:], skip_special_tokens=False)
        return cls(formats, tuple(tools), formats.has_opened_reasoning(tail))

    def shown_token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Return the special tokens that must be part of the output's text, because the parser searches for them."""
        ids = [tokenizer.added_token_id(text) for text in self.formats.tokens(self.tools)]
        return [token_id for token_id in ids if token_id is not None]

    def stream_parser(self, *, parallel_tool_calls: bool = True) -> OutputStream:
        """Return a parser for the streamed text of one sample. Without `parallel_tool_calls`, only the first tool call is returned."""
        return self.formats.stream(self.tools, several=parallel_tool_calls, in_reasoning=self.in_reasoning)

    def parse(self, output: RequestOutput) -> RequestOutput:
        """Return a finished output with content, reasoning and tool calls parsed from its text."""
        stream = self.stream_parser()
        events = [*stream.push(output.text), *stream.finish()]
        parsed = ParsedOutput.of_events(events, stream.sink.broken_off)
        return replace(output, content=parsed.content, reasoning=parsed.reasoning, tool_calls=parsed.tool_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversation:
    """A conversation and the options with which it is rendered."""

    input_processor: "InputProcessor"
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    allow_special_tokens: bool
    notices: tuple[str, ...] = ()

    def render(self, messages: Sequence[Message]) -> str:
        return self.input_processor.tokenizer.render_chat(
            messages,
            tools=self.tools,
            options=self.options,
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
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
    """Build the prompt of a conversation. Call this outside an event loop, because it may block for seconds.

    Args:
        tools: functions that the model may call.
        template_options: further variables of the chat template, such as {"enable_thinking": False}.
        add_generation_prompt: whether the prompt ends with the beginning of an assistant message.
        continue_final_message: whether the output continues the last message, which must be an assistant's. `add_generation_prompt` is
            then ignored.
        allow_special_tokens: whether the spelling of a control token in a message is encoded as that control token.

    Raises:
        RequestError: the conversation is empty, too long or malformed, or the template rejects it.
        BackendUnavailableError: the process that renders templates cannot be started.
    """
    parsed_tools = parse_tools(tools)
    checked = _check_messages(input_processor, messages, [parsed_tools, template_options], continue_final_message=continue_final_message)
    template_options = {} if template_options is None else template_options
    check_template_options(input_processor.tokenizer, template_options)
    conversation = _Conversation(
        input_processor=input_processor,
        messages=messages_for_template(checked, has_developer_role=_has_developer_role(input_processor.tokenizer, checked)),
        tools=[tool_for_template(tool) for tool in parsed_tools],
        options=template_options,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        allow_special_tokens=allow_special_tokens,
    )
    prompt = None
    if input_processor.tokenizer.template_uses("tools") or not (parsed_tools or has_tool_calls(checked)):
        prompt, text = _render_and_encode(conversation)
        prompt = prompt if all(tool.name in text for tool in parsed_tools) else None
    if prompt is None:
        messages = with_generic_tools(conversation.messages, generic_tool_prompt(parsed_tools) if parsed_tools else "")
        prompt, _ = _render_and_encode(replace(conversation, messages=messages, tools=(), notices=(GENERIC_TOOLS_NOTICE,)))
        prompt = replace(prompt, uses_generic_tools=bool(parsed_tools))
    for notice in prompt.notices:
        input_processor.log_once(notice)
    return prompt


def check_template_options(tokenizer: Tokenizer, options: Mapping[Any, Any]) -> None:
    """Check that the chat template reads each of the options.

    Raises:
        RequestError: `options` is not a mapping, or the template does not read an option; `RequestError.parameter` is "template_options".
    """
    if not isinstance(options, Mapping):
        raise RequestError(f"chat_template_kwargs is {options!r}: give a mapping of names to values", parameter="template_options")
    for name in options:
        if not isinstance(name, str) or name in RESERVED_TEMPLATE_OPTIONS or not tokenizer.template_uses(name):
            raise RequestError(f"{name} is no option of this model's chat template: leave it out", parameter="template_options")


def _check_messages(
    input_processor: "InputProcessor", messages: Messages, tools_and_options: Sequence[Any], *, continue_final_message: bool
) -> Messages:
    """Check the number, form and length of messages; return the messages with strings as contents.

    Lengths are checked before anything is rendered or encoded, so that conversations that are too long are rejected quickly.

    Args:
        tools_and_options: values whose strings count towards the length.
    """
    if not hasattr(messages, "__len__") or isinstance(messages, str | Mapping):
        raise RequestError(f"messages is {messages!r}: give a list of {{'role', 'content'}}", parameter="messages")
    if not messages:
        raise RequestError("messages is empty: send at least one message", parameter="messages")
    input_processor.check_num_messages(len(messages))
    with_strings = with_string_contents(messages)
    for index, message in enumerate(with_strings):
        _check_message(index, message)
    try:
        input_processor.check_num_chars(sum(map(len, strings_in([*with_strings, *tools_and_options]))))
    except RecursionError:
        raise RequestError("messages or tools are nested too deeply: send them flatter", parameter="messages") from None
    last = with_strings[-1]
    if continue_final_message and (last.get("role") != "assistant" or last.get("tool_calls") or not isinstance(last.get("content"), str)):
        raise RequestError(
            "continue_final_message continues the text of an assistant, and the last message is none: send one with a text and no calls",
            parameter="continue_final_message",
        )
    return with_strings


def _check_message(index: int, message: object) -> None:
    if not isinstance(message, Mapping):
        raise RequestError(f"messages contains {message!r}: give {{'role', 'content'}}", parameter="messages")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        problem = "is missing" if role is None else f"is {role!r}"
        raise RequestError(f"messages[{index}].role {problem}: give system, user, assistant or tool", parameter=f"messages[{index}].role")
    if not isinstance(content, str | None):
        raise RequestError(
            f"messages[{index}].content is {content!r}: give a text or a list of text parts", parameter=f"messages[{index}].content"
        )
    if role in _ROLES_WITH_CONTENT and content is None:
        raise RequestError(f"messages[{index}].content is missing: give a text", parameter=f"messages[{index}].content")


def _render_and_encode(conversation: _Conversation) -> tuple[ChatPrompt, str]:
    """Render and encode a conversation; return the prompt as token ids, and its text."""
    conversation = _move_unrendered_system_text(conversation)
    tokenizer = conversation.input_processor.tokenizer
    template = tokenizer.template_source(has_tools=bool(conversation.tools))
    values: list[Any] = [*conversation.messages, list(conversation.tools), dict(conversation.options)]
    searched_texts = _texts_searched_by_template(conversation.messages, template)
    escaped = tokenizer.control_token_escaper.escape(values, other_texts=[template], exempt_texts=searched_texts)
    is_escaped = escaped.contains_control_text and not conversation.allow_special_tokens
    *messages, tools, options = escaped.value if is_escaped else values
    end_marker = escaped.placeholders.allocate_chars(1) if conversation.continue_final_message else ""
    if end_marker:
        messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{end_marker} "}
    text, notices = _render_accepted_variant(replace(conversation, messages=messages, tools=tools, options=options))
    if end_marker:
        text = _text_before_marker(text, end_marker)
    conversation.input_processor.check_num_chars(len(text))
    if is_escaped:
        text = escaped.unescape_json(text)
        ids = tokenizer.control_token_escaper.encode(escaped, text)
        text = escaped.restore(text)
    else:
        ids = tokenizer.encode(text, add_special_tokens=False)
    return ChatPrompt(token_ids=ids, notices=(*conversation.notices, *notices)), text


def _text_before_marker(text: str, end_marker: str) -> str:
    """Return the text before `end_marker`, a character that was appended to the last message to find its end in the rendered text.

    If the template strips whitespace from the end of messages, whitespace before `end_marker` is removed as well.
    """
    index = text.rfind(end_marker)
    if index < 0:
        raise RequestError(
            "continue_final_message: this model's chat template does not show the text of the last message; send it as a finished message",
            parameter="continue_final_message",
        )
    return text[:index] if text[index + 1 : index + 2] == " " else text[:index].rstrip()


def _has_developer_role(tokenizer: Tokenizer, messages: Messages) -> bool:
    """Return whether the template renders "developer" messages; True if the conversation has none."""
    if not any(message.get("role") == "developer" for message in messages):
        return True
    probe = {"role": "developer", "content": _DEVELOPER_PROBE}
    return tokenizer.template_uses("developer") and tokenizer.template_renders([_DEVELOPER_PROBE], [probe, _PROBE_USER_MESSAGE])


def _move_unrendered_system_text(conversation: _Conversation) -> _Conversation:
    """If the template does not render system messages, return the conversation with their text moved into user messages."""
    messages, tokenizer, has_tools = conversation.messages, conversation.input_processor.tokenizer, bool(conversation.tools)
    if not any(message.get("role") in ("system", "developer") for message in messages):
        return conversation
    moved = None
    first_system, later_system = ({"role": "system", "content": probe} for probe in (_FIRST_SYSTEM_PROBE, _LATER_SYSTEM_PROBE))
    if not tokenizer.template_renders([_FIRST_SYSTEM_PROBE], [first_system, _PROBE_USER_MESSAGE], has_tools=has_tools):
        moved = with_system_as_user_text([{**one, "role": "system"} if one.get("role") == "developer" else one for one in messages])
    elif (later_moved := with_later_system_as_user_text(messages)) != messages:
        both = [first_system, _PROBE_USER_MESSAGE, _PROBE_ASSISTANT_MESSAGE, later_system, _PROBE_USER_MESSAGE]
        moved = None if tokenizer.template_renders([_FIRST_SYSTEM_PROBE, _LATER_SYSTEM_PROBE], both, has_tools=has_tools) else later_moved
    if moved is not None:
        return replace(conversation, messages=moved, notices=(*conversation.notices, SYSTEM_AS_USER_NOTICE))
    return conversation


def _render_accepted_variant(conversation: _Conversation) -> tuple[str, tuple[str, ...]]:
    """Render the least changed variant of the conversation that the template accepts; return the text and notices of the changes.

    If the template rejects every variant, the error for the unchanged conversation is raised.
    """
    started_s, first_error = time.monotonic(), None
    for variant, adaptations in _adapted_variants(conversation):
        try:
            text = variant.render(variant.messages)
        except RequestError as error:
            first_error = first_error or error
            # templates can be slow, so one time limit covers all variants
            if time.monotonic() - started_s > _MAX_VARIANTS_S:
                break
            continue
        if with_arguments_as_text not in adaptations and _has_python_repr_arguments(variant.messages, text):
            text = variant.render(with_arguments_as_text(variant.messages))
        if with_system_as_user_text not in adaptations and not _has_all_system_messages(variant.messages, text):
            moved = with_system_as_user_text(variant.messages)
            with suppress(RequestError):
                return variant.render(moved), (SYSTEM_AS_USER_NOTICE,)
        return text, ((SYSTEM_AS_USER_NOTICE,) if with_system_as_user_text in adaptations else ())
    assert first_error is not None
    raise first_error


def _has_all_system_messages(messages: Sequence[Message], text: str) -> bool:
    """Return whether a prompt has the text of all system messages. Mistral Nemo's template omits the text unless a user message is last."""
    return all(str(message.get("content") or "").strip() in text for message in messages if message.get("role") == "system")


def _adapted_variants(conversation: _Conversation) -> Iterator[tuple[_Conversation, Sequence[MessagesAdaptation]]]:
    """Yield variants of a conversation and the changes that made them. Variants with fewer changes come first."""
    typed_tools = [tool_with_types(tool) for tool in conversation.tools]
    tool_variants = [conversation.tools] if typed_tools == conversation.tools else [conversation.tools, typed_tools]
    tried_messages: list[Sequence[Message]] = []
    for count in range(len(_ADAPTATIONS) + 1):
        for adaptations in combinations(_ADAPTATIONS, count):
            messages: Sequence[Message] = conversation.messages
            for adapt in adaptations:
                messages = adapt(messages)
            if messages not in tried_messages:
                tried_messages.append(messages)
                yield from ((replace(conversation, messages=messages, tools=tools), adaptations) for tools in tool_variants)


def _has_python_repr_arguments(messages: Sequence[Message], text: str) -> bool:
    """Return whether the text has tool arguments as Python writes a dict, with single quotes, instead of JSON."""
    arguments = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or ()]
    return any(f"{value}" in text for value in arguments if isinstance(value, dict) and f"{value}".startswith("{'"))


def _texts_searched_by_template(messages: Sequence[Message], template: str) -> dict[int, list[str]]:
    """Return, by index of each assistant message, the texts that the template searches for in the message, such as "</think>"."""
    texts = [match[1] or match[2] or match[3] or match[4] for match in _SEARCHED_LITERAL.finditer(template)]
    return {index: texts for index, message in enumerate(messages) if texts and message.get("role") == "assistant"}
