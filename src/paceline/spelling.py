"""Suggestions for arguments we do not have."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Collection
from difflib import get_close_matches
from typing import ParamSpec, TypeVar, cast, get_args, get_type_hints

from paceline.errors import ConfigError, PacelineError, RequestError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

OTHER_NAMES = {
    # sampling
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "temp": "temperature",
    "do_sample": "temperature",
    "random_seed": "seed",
    "random_state": "seed",
    "num_return_sequences": "n",
    "repeat_penalty": "repetition_penalty",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "stop_words": "stop",
    "eos_token_id": "stop_token_ids",
    "include_stop_str_in_output": "include_stop",
    "bad_words_ids": "bad_words",
    "suppress_tokens": "banned_token_ids",
    "logits_processor": "processors",
    "logits_processors": "processors",
    "top_logprobs": "logprobs",
    "guided_decoding": "grammar",
    "guided_json": "grammar",
    "guided_regex": "grammar",
    "guided_choice": "grammar",
    "guided_grammar": "grammar",
    "structured_outputs": "grammar",
    "response_format": "grammar",
    # loading
    "model_path": "model",
    "model_name": "model",
    "max_seq_len": "max_model_len",
    "context_length": "max_model_len",
    "n_ctx": "max_model_len",
    "n_threads": "threads",
    "num_threads": "threads",
    "torch_dtype": "dtype",
    "load_in_8bit": "quantization",
    "load_in_4bit": "quantization",
    "gpu_memory_utilization": "kv_cache_gb",
    "cache_type_k": "kv_cache_dtype",
    "cache_type_v": "kv_cache_dtype",
    "n_batch": "max_num_batched_tokens",
    "speculative_config": "drafter",
    "speculative_model": "drafter",
    "assistant_model": "drafter",
    "draft_model": "drafter",
    "num_assistant_tokens": "num_speculative_tokens",
    "prompt_lookup_num_tokens": "num_speculative_tokens",
    "use_auth_token": "hf_token",
    "local_files_only": "offline",
    # asking
    "inputs": "prompts",
    "prompt_token_ids": "prompts",
    "conversation": "messages",
}
"""Other libraries' names, and ours."""

NEEDLESS = {
    "use_tqdm": "nothing is shown while texts are made",
    "best_of": "n makes several outputs",
    "tensor_parallel_size": "a model runs on one machine's processors, or on one GPU",
    "trust_remote_code": "code that a checkpoint brings is never run",
    "tokenizer": "the model's own is used",
}
"""Other libraries' arguments that we do not have, and why."""


def unknown_argument(name: str, of: str, known: Collection[str], *, of_sampling: Collection[str] = ()) -> str:
    """One line that says that `of` has no argument `name`, and which one may be meant.

    Args:
        of_sampling: names that belong into `SamplingParams` instead.
    """
    refusal = f"{name} is no argument of {of}"
    if meant := _meant(name, known):
        return f"{refusal}: did you mean {meant}?"
    if meant := _meant(name, of_sampling):
        return f"{refusal}: give params=SamplingParams({meant}=...)" + (" to generate or chat" if of == "LLM" else "")
    if name in NEEDLESS:
        return f"{refusal}: leave it out, {NEEDLESS[name]}"
    return f"{refusal}: it takes {', '.join(sorted(known))}"


def _meant(name: str, known: Collection[str]) -> str | None:
    if name in known:
        return name
    other = OTHER_NAMES.get(name)
    return other if other in known else next(iter(get_close_matches(name, known, 1, 0.75)), None)


def suggest_arguments(
    of: str, *, of_sampling: Collection[str] = ()
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Decorator: an unknown keyword argument raises an error that suggests the right one.

    The error is a ConfigError where `of` is "LLM", else a RequestError. `**options: Unpack[...]` counts, and is shown, as the arguments it
    stands for.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        signature = _written_out(inspect.signature(function))
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
        async def checked_later(*arguments: Arguments.args, **named: Arguments.kwargs) -> object:
            check(named)
            return await cast(Awaitable[object], function(*arguments, **named))

        chosen = checked_later if inspect.iscoroutinefunction(function) else checked
        chosen.__dict__["__signature__"] = signature
        return cast(Callable[Arguments, Result], chosen)

    return decorate


def _written_out(signature: inspect.Signature) -> inspect.Signature:
    """With the arguments that `**options: Unpack[...]` of a dictionary type stands for; they may be left out."""
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
