"""Types and checks of the arguments of `LLM.generate` and `LLM.chat`: prompts, conversations, sampling parameters and options."""

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
    """Options of a call other than sampling parameters, as keyword arguments. Only `adapter` changes which tokens are generated.

    Attributes:
        adapter: name of a loaded adapter; None = the target without an adapter. A list has one item for each prompt.
        prediction: text or token ids that the output will resemble, or None; a list has one item for each prompt. Needs the drafter
            "prediction".
        namespace: requests with the same namespace may draft from each other's finished outputs; None = no sharing.
        speculation: how drafts are made for these requests: a `SpeculationOptions`, or a mapping such as {"enabled": False}.
        cache_salt: only requests with the same salt share cached rows of their prompts.
        shown_token_ids: special tokens that are part of the output's text, where stop strings are searched. Others are omitted from it.
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
        tools: functions that the model may call: {"type": "function", "function": {"name", "description", "parameters"}}.
        chat_template_kwargs: further variables of the chat template, such as {"enable_thinking": False}.
        add_generation_prompt: whether the prompt ends with the beginning of an assistant message; True by default.
        continue_final_message: whether the output continues the last message, which must be an assistant's. `add_generation_prompt` is
            then ignored.
        allow_special_tokens: whether the spelling of a control token in a message, such as "<|im_end|>", is encoded as that token. By
            default it is encoded as ordinary text.
        tool_call_parser, reasoning_parser: format of the model's tool calls and reasoning; "auto" = derived from the chat template.
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
_PARSER_OPTION_NAMES = ("tool_call_parser", "reasoning_parser")


def split_chat_options(options: ChatOptions) -> tuple[dict[str, Any], RequestOptions]:
    """Split options of a conversation into arguments of `chat_prompt.chat_prompt` and options of the request."""
    prompt = {_CHAT_OPTION_NAMES[name]: value for name, value in options.items() if name in _CHAT_OPTION_NAMES and value is not None}
    request = {name: value for name, value in options.items() if name not in (*_CHAT_OPTION_NAMES, *_PARSER_OPTION_NAMES)}
    return prompt, cast(RequestOptions, request)


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return a list of prompts. A string, a mapping or a list of numbers is one prompt; anything else is a list of prompts.

    Raises:
        RequestError: `prompts` has a length but no order, such as a set.
    """
    if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__len__"):
        return [cast(Prompt, prompts)]
    try:
        is_single = len(prompts) > 0 and not hasattr(prompts[0], "__len__")
    except (TypeError, LookupError):
        raise RequestError(f"prompts is {prompts!r}: give a prompt, or a list of prompts", parameter="prompt") from None
    return [cast(Prompt, prompts)] if is_single else cast(Sequence[Prompt], prompts)


def parse_prompt(prompt: Prompt) -> str | list[int]:
    """Return a prompt as its text or its token ids.

    Raises:
        RequestError: the prompt is neither a string, a list of token ids, nor a mapping that contains one of these.
    """
    if not isinstance(prompt, Mapping):
        return prompt if isinstance(prompt, str) else parse_token_ids(prompt, "prompt")
    if len(prompt) != 1 or not set(prompt) <= set(PROMPT_KEYS):
        keys = ", ".join(map(str, prompt)) or "nothing"
        raise RequestError(f"a prompt is a mapping with {keys}: give one of {' and '.join(PROMPT_KEYS)}", parameter="prompt")
    ((name, value),) = prompt.items()
    if name == "prompt" and not isinstance(value, str):
        raise RequestError(f"prompt is {value!r}: give a string, or prompt_token_ids", parameter="prompt")
    return value if isinstance(value, str) else parse_token_ids(value, name)


def parse_token_ids(ids: object, name: str) -> list[int]:
    """Return token ids as a list. `ids` may be any iterable of whole numbers, such as a numpy array.

    Raises:
        RequestError: `ids` is not an iterable of whole numbers; `RequestError.parameter` is `name`.
    """
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes | bytearray):
        raise RequestError(f"{name} is {ids!r}: give a string or a list of token ids", parameter=name)
    return [_parse_token_id(item, name) for item in ids]


def _parse_token_id(item: object, name: str) -> int:
    try:
        if not isinstance(item, bool):
            return operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise RequestError(f"{name} contains {item!r}, which is no token id: give a string or whole numbers", parameter=name)


def params_per_prompt(params: Params, num_prompts: int) -> Sequence[SamplingParams]:
    """Return one `SamplingParams` for each prompt; None = the defaults.

    Raises:
        RequestError: `params` has another type, or the numbers of parameters and prompts differ.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    unchecked_params: object = params
    if not isinstance(unchecked_params, Sequence) or not all(isinstance(one, SamplingParams) for one in unchecked_params):
        text = f"sampling_params is {params!r}: give SamplingParams, or a list with one for each prompt"
        raise RequestError(text, parameter="sampling_params")
    if len(params) != num_prompts:
        text = f"{len(params)} sampling_params for {num_prompts} prompts: give one for all of them, or one for each"
        raise RequestError(text, parameter="sampling_params")
    return params
