"""Error texts for unknown arguments and methods, with the name that the caller may have meant."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Collection
from difflib import get_close_matches
from typing import ParamSpec, TypeVar, cast, get_args, get_type_hints

from paceline.errors import ConfigError, RequestError

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
    "num_predict": "max_tokens",
    "num_ctx": "max_model_len",
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
"""Arguments of other libraries whose names differ much from ours, and ours."""


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
"""Methods of models in vLLM, transformers and llama-cpp-python, and what to use instead."""


def unknown_method(name: str) -> str:
    """Return the error text for an attribute that `LLM` does not have, with what to use instead."""
    hint = _OTHER_METHODS.get(name)
    return f"an LLM has no {name}" + (f": {hint}" if hint else "")


def unknown_argument(name: str, function_name: str, known: Collection[str], *, sampling_names: Collection[str] = ()) -> str:
    """Return the error text for an argument that a function does not have, with the one that may be meant.

    Args:
        known: names of the function's arguments.
        sampling_names: names that are arguments of `SamplingParams` instead.
    """
    text = f"{name} is no argument of {function_name}"
    if close := _closest_name(name, known):
        return f"{text}: did you mean {close}?"
    if close := _closest_name(name, sampling_names):
        return f"{text}: give sampling_params=SamplingParams({close}=...)" + (" to generate or chat" if function_name == "LLM" else "")
    return f"{text}: it takes {', '.join(sorted(known))}"


def _closest_name(name: str, known: Collection[str]) -> str | None:
    if name in known:
        return name
    other = OTHER_NAMES.get(name)
    return other if other in known else next(iter(get_close_matches(name, known, 1, 0.75)), None)


def suggest_arguments(
    function_name: str, *, sampling_names: Collection[str] = ()
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator: for an unknown keyword argument, the decorated function raises an error that suggests a known one.

    The error is a ConfigError if `function_name` is "LLM", else a RequestError. If the function has `**options: Unpack[...]` of a
    TypedDict, the keys of the TypedDict are its known arguments.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        signature = _expand_options(inspect.signature(function))
        known = [name for name in signature.parameters if name != "self"]

        def check(given: Collection[str]) -> None:
            for name in given:
                if name not in known:
                    text = unknown_argument(name, function_name, known, sampling_names=sampling_names)
                    raise ConfigError(text) if function_name == "LLM" else RequestError(text, parameter=name)

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
    """Replace the parameter `**options: Unpack[...]` of a TypedDict by one optional parameter for each key."""
    parameters = list[inspect.Parameter]()
    for one in signature.parameters.values():
        if one.kind is not inspect.Parameter.VAR_KEYWORD:
            parameters.append(one)
            continue
        (options,) = get_args(one.annotation)
        for name, annotation in get_type_hints(options).items():
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return signature.replace(parameters=parameters)
