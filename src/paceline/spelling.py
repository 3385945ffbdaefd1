"""Suggests the closest known name for an unknown argument."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Collection
from difflib import get_close_matches
from typing import ParamSpec, TypeVar, cast, get_args, get_type_hints

from paceline.errors import ConfigError, PacelineError, RequestError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

OTHER_NAMES = {
    # vLLM
    "params": "sampling_params",
    "include_stop_str_in_output": "include_stop",
    "logits_processors": "processors",
    "structured_outputs": "grammar",
    "guided_decoding": "grammar",
    "speculative_model": "drafter",
    "gpu_memory_utilization": "kv_cache_gb",
    # transformers
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "do_sample": "temperature",
    "num_return_sequences": "n",
    "eos_token_id": "stop_token_ids",
    "suppress_tokens": "banned_token_ids",
    "torch_dtype": "dtype",
    "assistant_model": "drafter",
    "num_assistant_tokens": "num_speculative_tokens",
    # llama.cpp
    "n_predict": "max_tokens",
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    "n_ctx": "max_model_len",
    "n_threads": "threads",
    "n_batch": "max_num_batched_tokens",
    "predict": "max_tokens",
    "draft_max": "num_speculative_tokens",
    "model_draft": "drafter",
    "spec_draft_model": "drafter",
    "hf_repo": "model",
    "n_gpu_layers": "device",
    "ngl": "device",
    "hf": "model",
    "np": "max_num_seqs",
    "cache_type_k": "kv_cache_dtype",
    "draft_model": "drafter",
}
"""Names that users of other libraries would type, if they are not close to ours."""


_OTHER_METHODS = {
    "get_tokenizer": "use .tokenizer",
    "get_default_sampling_params": "use .sampling_defaults",
    "beam_search": "there is no beam search; use .generate with n samples",
    "from_pretrained": 'use LLM("owner/name"), LLM("directory") or LLM("file.gguf")',
    "create_completion": "use .generate(prompt, SamplingParams(...))",
    "create_chat_completion": "use .chat(messages, SamplingParams(...))",
    "create_embedding": "there are no embeddings, only generated text",
    "embed": "there are no embeddings, only generated text",
    "encode": "use .tokenizer.encode(text)",
    "tokenize": "use .tokenizer.encode(text)",
    "detokenize": "use .tokenizer.decode(ids)",
}
"""Methods of vLLM's, transformers' and llama-cpp-python's models, with ours."""


def unknown_method(name: str) -> str:
    """Return the text of an error: an LLM has no attribute `name`, and what to use."""
    hint = _OTHER_METHODS.get(name)
    return f"an LLM has no {name}" + (f": {hint}" if hint else "")


def unknown_argument(name: str, of: str, known: Collection[str], *, of_sampling: Collection[str] = ()) -> str:
    """Return the text of an error: `of` has no argument `name`, and which one may be meant.

    Args:
        of_sampling: names that belong in `SamplingParams` instead.
    """
    text = f"{name} is no argument of {of}"
    if close := _closest(name, known):
        return f"{text}: did you mean {close}?"
    if close := _closest(name, of_sampling):
        return f"{text}: give sampling_params=SamplingParams({close}=...)" + (" to generate or chat" if of == "LLM" else "")
    return f"{text}: it takes {', '.join(sorted(known))}"


def _closest(name: str, known: Collection[str]) -> str | None:
    if name in known:
        return name
    other = OTHER_NAMES.get(name)
    return other if other in known else next(iter(get_close_matches(name, known, 1, 0.75)), None)


def suggest_arguments(
    of: str, *, of_sampling: Collection[str] = ()
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Decorate a function so that an unknown keyword argument raises an error that suggests the right one.

    The error is a ConfigError if `of` is "LLM", else a RequestError. `**options: Unpack[...]` of a TypedDict counts as its keys.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        signature = _expand_options(inspect.signature(function))
        known = [name for name in signature.parameters if name != "self"]

        def check(given: Collection[str]) -> None:
            for name in given:
                if name not in known:
                    raise _error(unknown_argument(name, of, known, of_sampling=of_sampling), name, of)

        @functools.wraps(function)
        def checked(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
            check(named)
            return function(*arguments, **named)

        @functools.wraps(function)
        async def checked_async(*arguments: Arguments.args, **named: Arguments.kwargs) -> object:
            check(named)
            return await cast(Awaitable[object], function(*arguments, **named))

        chosen = checked_async if inspect.iscoroutinefunction(function) else checked
        chosen.__dict__["__signature__"] = signature
        return cast(Callable[Arguments, Result], chosen)

    return decorate


def _expand_options(signature: inspect.Signature) -> inspect.Signature:
    """Replace `**options: Unpack[...]` of a TypedDict by its keys, as optional arguments."""
    parameters = list[inspect.Parameter]()
    for one in signature.parameters.values():
        if one.kind is not inspect.Parameter.VAR_KEYWORD:
            parameters.append(one)
            continue
        (options,) = get_args(one.annotation)
        for name, annotation in get_type_hints(options).items():
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return signature.replace(parameters=parameters)


def _error(text: str, name: str, of: str) -> PacelineError:
    return ConfigError(text) if of == "LLM" else RequestError(text, parameter=name)
