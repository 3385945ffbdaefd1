"""Forms of prompts, conversations, sampling parameters and options that callers pass."""

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
    """Options of prompts other than sampling, as keyword arguments. Only the adapter changes tokens.

    Attributes:
        adapter: name of a loaded adapter; None = the target's own weights. A list has one, or None, for each prompt.
        prediction: text or token ids that the output will resemble; a list has one, or None, for each prompt. Needs the drafter
            "prediction".
        namespace: requests with the same one may draft from each other's finished outputs; None = no sharing.
        speculation: how these requests may be drafted for: a `SpeculationOptions`, or a mapping such as {"enabled": False}.
        cache_salt: only requests with the same one share cached rows of their prompts.
        shown_token_ids: special tokens that are part of the output's text, in which stop strings are searched for. Others are not.
    """

    adapter: str | Sequence[str | None] | None
    prediction: TextOrIds | Sequence[TextOrIds | None] | None
    namespace: str | None
    speculation: SpeculationOptions | Mapping[str, object] | None
    cache_salt: str | bytes | None
    shown_token_ids: Sequence[int]


class ChatOptions(RequestOptions, total=False):
    """Options of a conversation, as keyword arguments.

    Attributes:
        tools: functions that may be called: {"type": "function", "function": {"name", "description", "parameters"}}.
        chat_template_kwargs: further variables of the chat template, such as {"enable_thinking": False}.
        add_generation_prompt: whether to begin the assistant's turn; True by default.
        continue_final_message: whether the output continues the text of the last message, an assistant's. Then no turn is begun.
        allow_special_tokens: whether control tokens in the text of messages, such as "<|im_end|>", are control tokens. By default they
            are ordinary text.
        tool_call_parser, reasoning_parser: format of the model's tool calls and reasoning; "auto" = as its chat template shows.
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
    """Return the arguments of `chat_prompt.chat_prompt` in these options, and the options of the request."""
    prompt = {_CHAT_OPTION_NAMES[name]: value for name, value in options.items() if name in _CHAT_OPTION_NAMES and value is not None}
    request = {name: value for name, value in options.items() if name not in (*_CHAT_OPTION_NAMES, *_PARSER_NAMES)}
    return prompt, cast(RequestOptions, request)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return a list of prompts. A string, a list of ids or a mapping is one prompt, anything else a list of prompts."""
    if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__len__") or (len(prompts) > 0 and not hasattr(prompts[0], "__len__")):
        return [cast(Prompt, prompts)]
    return cast(Sequence[Prompt], prompts)


def text_or_ids(prompt: Prompt) -> str | list[int]:
    """Return the text or the token ids of a prompt.

    Raises:
        RequestError: it has another form.
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
    """Return token ids from any iterable of whole numbers.

    Raises:
        RequestError: it is something else.
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


def params_of_each(params: Params, num_prompts: int) -> Sequence[SamplingParams]:
    """Return the sampling parameters of each prompt; None = the defaults.

    Raises:
        RequestError: they are something else, or not as many as prompts.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    given: object = params
    if not isinstance(given, Sequence) or not all(isinstance(one, SamplingParams) for one in given):
        text = f"sampling_params is {params!r}: give SamplingParams, or a list with one for each prompt"
        raise RequestError(text, parameter="sampling_params")
    if len(params) != num_prompts:
        text = f"{len(params)} sampling_params for {num_prompts} prompts: give one for all of them, or one for each"
        raise RequestError(text, parameter="sampling_params")
    return params
