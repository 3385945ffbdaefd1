"""What callers hand in, in the forms they know: prompts, conversations and sampling parameters."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, cast

from paceline.engine.request import SpeculationOptions
from paceline.errors import RequestError
from paceline.parsing.tools import Tool
from paceline.sampling.params import SamplingParams

TextOrIds = str | Sequence[int]
Prompt = TextOrIds | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None
PROMPT_KEYS = ("prompt", "prompt_token_ids")


class RequestOptions(TypedDict, total=False):
    """What may go with prompts besides their sampling, as keyword arguments; none of it but the adapter changes a token.

    Attributes:
        adapter: name of a loaded adapter whose tokens are wanted; None = the target's own. A list has one, or None, for each prompt.
        prediction: text or token ids the outputs will resemble; a list has one, or None, for each prompt. Needs the drafter "prediction".
        namespace: whose finished outputs a suffix store may offer as guesses and remember these in; None = nobody's.
        speculation: how these requests may be drafted for: a `SpeculationOptions`, or a mapping such as {"enabled": False}.
        cache_salt: only requests with the same one share cached rows of their prompts.
        shown_token_ids: special tokens that are part of the outputs' texts, and of the text that stop strings are looked for in; the
            others are not.
    """

    adapter: str | Sequence[str | None] | None
    prediction: TextOrIds | Sequence[TextOrIds | None] | None
    namespace: str | None
    speculation: SpeculationOptions | Mapping[str, object] | None
    cache_salt: str | bytes | None
    shown_token_ids: Sequence[int]


class ChatOptions(RequestOptions, total=False):
    """What may go with a conversation, as keyword arguments.

    Attributes:
        tools: functions that may be called: {"type": "function", "function": {"name", "description", "parameters"}}.
        chat_template_kwargs: further variables of the chat template, such as {"enable_thinking": False}.
        add_generation_prompt: whether the assistant's turn is begun; True by default.
        continue_final_message: whether the output continues the text of the last message, an assistant's. No turn is begun then.
        allow_special_tokens: whether control tokens that the messages spell out, such as "<|im_end|>", are control tokens. By default
            they are ordinary text.
        tool_call_parser, reasoning_parser: how the model writes calls and reasoning; "auto" = as its chat template shows.
    """

    tools: Sequence[Tool | Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool
    allow_special_tokens: bool
    tool_call_parser: str
    reasoning_parser: str


_CHAT_OPTION_NAMES = {
    "tools": "tools",
    "chat_template_kwargs": "template_options",
    "add_generation_prompt": "add_generation_prompt",
    "continue_final_message": "continue_final_message",
    "allow_special_tokens": "allow_special_tokens",
}
_PARSER_NAMES = ("tool_call_parser", "reasoning_parser")


def split_chat_options(options: ChatOptions) -> tuple[dict[str, Any], RequestOptions]:
    """The arguments of `chat_prompt.chat_prompt` in these options, and the options of the request."""
    prompt = {_CHAT_OPTION_NAMES[name]: value for name, value in options.items() if name in _CHAT_OPTION_NAMES and value is not None}
    request = {name: value for name, value in options.items() if name not in (*_CHAT_OPTION_NAMES, *_PARSER_NAMES)}
    return prompt, cast(RequestOptions, request)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt is a string, a list of ids or a mapping; anything else is a list of prompts.

    Raises:
        RequestError: the list is empty.
    """
    if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__len__") or (len(prompts) > 0 and not hasattr(prompts[0], "__len__")):
        return [cast(Prompt, prompts)]
    if len(prompts) == 0:
        raise RequestError("there is no prompt: give a string, a list of token ids, or a list of these", parameter="prompt")
    return cast(Sequence[Prompt], prompts)


def text_or_ids(prompt: Prompt) -> str | list[int]:
    """What a prompt holds; a mapping holds one of both by name.

    Raises:
        RequestError: it is none.
    """
    if not isinstance(prompt, Mapping):
        return prompt if isinstance(prompt, str) else as_ids(prompt, "prompt")
    if len(prompt) != 1 or not set(prompt) <= set(PROMPT_KEYS):
        held = ", ".join(map(str, prompt)) or "nothing"
        raise RequestError(f"a prompt is a mapping with {held}: give one of {' and '.join(PROMPT_KEYS)}", parameter="prompt")
    ((name, value),) = prompt.items()
    if name == "prompt" and not isinstance(value, str):
        raise RequestError(f"prompt is {value!r}: give a string, or prompt_token_ids", parameter="prompt")
    return value if isinstance(value, str) else as_ids(value, name)


def as_ids(ids: object, name: str) -> list[int]:
    """Token ids from any iterable of whole numbers.

    Raises:
        RequestError: it is none.
    """
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes | bytearray):
        raise RequestError(f"{name} is {ids!r}: give a string or a list of token ids", parameter=name)
    return [_as_id(item, name) for item in ids]


def _as_id(item: object, name: str) -> int:
    try:
        if not isinstance(item, bool):
            return operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise RequestError(f"{name} holds {item!r}, which is no token id: give a string or whole numbers", parameter=name)


def one_of(params: Params, sampling_params: Params) -> Params:
    """`sampling_params` is another name of `params`.

    Raises:
        RequestError: both are given.
    """
    if params is not None and sampling_params is not None:
        raise RequestError("params and sampling_params are one thing: give one of them", parameter="params")
    return sampling_params if params is None else params


def params_of_each(params: Params, num_prompts: int) -> Sequence[SamplingParams]:
    """Those of each prompt; None = the defaults.

    Raises:
        RequestError: they are something else, or not as many as prompts.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    given: object = params
    if not isinstance(given, Sequence) or not all(isinstance(one, SamplingParams) for one in given):
        raise RequestError(f"params is {params!r}: give SamplingParams, or a list with one for each prompt", parameter="params")
    if len(params) != num_prompts:
        raise RequestError(f"{len(params)} params for {num_prompts} prompts: give one for all of them, or one for each", parameter="params")
    return params


def with_plain_texts(messages: Messages) -> Messages:
    """The same messages, where the content of each is a string: parts are joined by line ends, as vLLM does.

    Raises:
        RequestError: a part is none of text.
    """
    return [_with_plain_text(message) for message in messages]


def _with_plain_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    given: object = message
    content = given.get("content") if isinstance(given, Mapping) else None  # whoever renders them says what is wrong with others
    return {**message, "content": "\n".join(map(_text_of, content))} if isinstance(content, list | tuple) else message


def _text_of(part: object) -> str:
    way_out = "give {'type': 'text', 'text': ...}"
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestError(f"a message holds the part {part!r}: {way_out}", parameter="messages")
    kind, text = part.get("type"), part.get("text")
    if kind is None:
        raise RequestError(f"a part of a message has no type: {way_out}", parameter="messages")
    if kind != "text":
        raise RequestError(f"a message holds a part of the type {kind!r}: this model reads text only", parameter="messages")
    if not isinstance(text, str):
        raise RequestError(f"a part of a message is of the type 'text' and its text is {text!r}: {way_out}", parameter="messages")
    return text
