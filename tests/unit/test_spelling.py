"""An argument that does not exist is answered with the one that may be meant."""

import asyncio
import inspect
from typing import TypedDict, Unpack

import pytest

from paceline.errors import ConfigError, RequestError
from paceline.spelling import suggest_arguments, unknown_argument

KNOWN = ("prompts", "drafter", "threads")
OF_SAMPLING = ("top_k", "max_tokens")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("treads", "treads is no argument of f: did you mean threads?"),
        ("n_threads", "n_threads is no argument of f: did you mean threads?"),
        ("topk", "topk is no argument of f: give sampling_params=SamplingParams(top_k=...)"),
        ("max_new_tokens", "max_new_tokens is no argument of f: give sampling_params=SamplingParams(max_tokens=...)"),
        ("x", "x is no argument of f: it takes drafter, prompts, threads"),
    ],
)
def test_unknown_argument_error_suggests_our_name_or_lists_all(name: str, text: str) -> None:
    assert unknown_argument(name, "f", KNOWN, sampling_names=OF_SAMPLING) == text


def test_known_arguments_reach_a_function_with_spelling_hints() -> None:
    @suggest_arguments("f")
    def f(prompts: str, *, threads: int = 1) -> tuple[str, int]:
        return prompts, threads

    assert (f("a"), f(prompts="a", threads=2)) == (("a", 1), ("a", 2))
    assert list(inspect.signature(f).parameters) == ["prompts", "threads"]
    with pytest.raises(RequestError, match="thread is no argument of f") as error:
        f("a", thread=2)  # type: ignore[call-arg]
    assert error.value.parameter == "thread"


class Options(TypedDict, total=False):
    namespace: str | None
    salt: bytes


def test_unpacked_typed_dict_options_are_known_arguments() -> None:
    @suggest_arguments("f")
    def f(prompts: str, **options: Unpack[Options]) -> Options:
        return options

    assert f("a", salt=b"s") == {"salt": b"s"}
    parameters = inspect.signature(f).parameters
    assert [str(parameters[name]) for name in parameters] == ["prompts: str", "namespace: str | None = None", "salt: bytes = None"]
    with pytest.raises(RequestError, match=r"slat is no argument of f: did you mean salt\?"):
        f("a", slat=b"s")  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="seed is no argument of f: it takes namespace, prompts, salt"):
        f("a", seed=1)  # type: ignore[call-arg]


def test_coroutine_function_with_spelling_hints_stays_a_coroutine() -> None:
    @suggest_arguments("LLM")
    async def f(*, threads: int = 1) -> int:
        return threads

    assert inspect.iscoroutinefunction(f)
    assert asyncio.run(f(threads=3)) == 3
    with pytest.raises(ConfigError, match="thread is no argument of LLM"):
        asyncio.run(f(thread=2))  # type: ignore[call-arg]
