"""Every failure is one clear error of the right class, and leaves no resources."""

import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.always_drafts import draft_always, set_drafters
from harness.checkpoints import write_checkpoint
from paceline import LLM, SamplingParams
from paceline.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    PacelineError,
    RequestError,
)
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import Drafter
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
BLOCK_BYTES = 16384  # of the tiny checkpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


@pytest.fixture
def copy(directory: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(directory, tmp_path / "copy"))


@pytest.fixture(scope="module")
def shared_llm(directory: Path) -> LLM:
    return open_llm(directory)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """One LLM for all tests, checked after each: whatever went wrong, nothing is held and the same tokens come."""
    yield shared_llm
    assert_usable(shared_llm)


def open_llm(directory: Path | str, **options: Any) -> LLM:
    return LLM(str(directory), **{"threads": 2, "device": "cpu", "kv_cache_gb": 0.02, "drafter": "ngram", "offline": True, **options})


def assert_usable(llm: LLM) -> None:
    llm.engine.cache.check_consistency()
    assert llm.engine.cache.pool.num_free == llm.engine.cache.pool.num_blocks
    outputs = [llm.generate([5, 6, 7], GREEDY)[0].token_ids for _ in range(2)]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 12


def raises(kind: type[PacelineError], *parts: object) -> Any:
    """One error of exactly this class whose text has all `parts`."""
    pattern = "".join(f"(?=.*{re.escape(str(part))})" for part in parts)
    return pytest.raises(kind, match=re.compile(pattern, re.DOTALL), check=lambda error: type(error) is kind)


# The model


def change_weights(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    from safetensors.numpy import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def test_nan_logits_at_load_are_a_checkpoint_error_and_not_cached(
    directory: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test of the machine must not learn from a damaged file what it would then believe of a good one."""
    expected = open_llm(directory).numerics
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "facts"))
    change_weights(copy, lambda weights: weights["model.norm.weight"].fill(np.nan))
    with raises(CheckpointError, "NaN", "verify the checkpoint's files"):
        open_llm(copy)
    assert open_llm(directory).numerics == expected


# Settings


@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [
        ("max_model_len", 513, "512"),
        ("gguf_weights", "fast", "exact, regroup"),
        ("drafter", [], "suffix"),
        ("drafter", None, "suffix"),
        ("drafter", ["ngram", 5], "suffix"),
    ],
)
def test_invalid_setting_error_names_value_and_range(directory: Path, name: str, value: object, way_out: str) -> None:
    with raises(ConfigError, name, tuple(value) if isinstance(value, list) else value, way_out):
        open_llm(directory, **{name: value})


# Requests


@pytest.mark.parametrize(
    "prompt",
    [None, 5, "", [[]], ["the", ""], [-1], [97], [10**30], [1.0], [True], [None], [[1, 2], 5], ["a", 5], b"abc", [np.float32(1)], {"a"}],
    ids=repr,
)
def test_invalid_prompt_is_refused_before_a_forward_pass(llm: LLM, prompt: Any) -> None:
    passes = llm.runtime.num_passes
    with raises(RequestError, "prompt") as caught:
        llm.generate(prompt, GREEDY)
    assert caught.value.parameter == "prompt"
    assert llm.runtime.num_passes == passes


def test_prompt_id_out_of_range_is_named_with_the_range(llm: LLM) -> None:
    with raises(RequestError, "id 97", "0 to 96"):
        llm.generate([5, 97], GREEDY)
    with raises(RequestError, "id 97", "0 to 96"):
        llm.stream([5, 97], GREEDY)


@pytest.mark.parametrize("messages", [None, [], [[]], "hi", [{"role": "robot", "content": "x"}]], ids=repr)
def test_invalid_messages_are_refused(llm: LLM, messages: Any) -> None:
    with raises(RequestError, "messages") as caught:
        llm.chat(messages, GREEDY)
    assert caught.value.parameter == "messages"


def test_prompt_as_long_as_the_context_is_refused(llm: LLM) -> None:
    with raises(
        RequestError, "512 tokens > 511 maximum", "context length is 512 tokens", "shorten the prompt (the model's maximum is 512 tokens)"
    ):
        llm.generate([[5], [5] * 512], GREEDY)


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"shown_token_ids": [99999]}, "shown_token_ids"),
        ({"shown_token_ids": 5}, "shown_token_ids"),
        ({"tools": 5}, "tools"),
        ({"chat_template_kwargs": 5}, "template_options"),
        ({"chat_template_kwargs": []}, "template_options"),
        ({"chat_template_kwargs": {5: 5}}, "template_options"),
    ],
    ids=repr,
)
def test_invalid_chat_option_is_refused_by_name(llm: LLM, options: Any, parameter: str) -> None:
    with raises(RequestError) as caught:
        llm.chat([{"role": "user", "content": "the cat"}], GREEDY, **options)
    assert caught.value.parameter == parameter


def test_stop_token_id_out_of_range_is_refused(llm: LLM) -> None:
    with raises(RequestError, "97", "96"):
        llm.generate([[5], [6]], SamplingParams(stop_token_ids=[97]))


def test_prompt_larger_than_the_cache_is_refused_before_a_pass(directory: Path) -> None:
    llm = open_llm(directory, kv_cache_gb=2 * BLOCK_BYTES / 1e9)
    assert llm.max_model_len == 512
    assert "raise kv_cache_gb" in llm.notices[-1]
    passes = llm.runtime.num_passes
    with raises(CapacityError, "70 tokens", "63 maximum", "shorten the prompt, lower max_tokens or raise kv_cache_gb"):
        llm.generate([[5] * 70], GREEDY)
    assert llm.runtime.num_passes == passes
    assert_usable(llm)


# Interruptions


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_closed_stream_frees_its_blocks(llm: LLM, count: int) -> None:
    stream = llm.stream([7] * 300, GREEDY)
    for _ in range(count):
        next(stream)
    stream.close()


class FailingDrafter(Drafter):
    """Fails only in the given method."""

    name = "failing"

    def __init__(self, propose: Callable[..., Any]) -> None:
        self._propose = propose

    def propose(self, requests: Any, budgets: Any) -> Any:
        return self._propose(requests)


def test_interrupt_in_a_drafter_frees_all_blocks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(requests: Any) -> Any:
        raise KeyboardInterrupt

    draft_always(monkeypatch)
    llm = open_llm(directory, drafter=FailingDrafter(interrupt))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6, 7]], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream([5], GREEDY))
    set_drafters(llm)
    assert_usable(llm)


# Drafters that misbehave


def _raise(requests: Any) -> Any:
    raise ValueError("no idea")


def _tree(*, tokens: Any = (5, 6, 7), parents: Any = (-1, 0, 1), depths: Any = (0, 1, 2), sources: Any = ("", "x", "x")) -> Any:
    return lambda requests: [DraftTree(tokens, parents, depths, sources) for _ in requests]


GARBAGE: dict[str, Callable[[Any], Any]] = {
    "an exception": _raise,
    "nothing": lambda requests: None,
    "too few": lambda requests: [],
    "too many": lambda requests: [None] * (len(requests) + 1),
    "no trees": lambda requests: ["tree"] * len(requests),
    "strings": lambda requests: [DraftTree.chain(request.token_ids[-1], ["a", "b"], "x") for request in requests],
    "one good, one bad": lambda requests: [DraftTree.chain(5, [6], "x"), *(["tree"] * len(requests))][-len(requests) :],
    "two roots": _tree(parents=(-1, -1, 1)),
    "no root": _tree(parents=(0, 0, 1)),
    "a circle": _tree(parents=(-1, 2, 1)),
    "a parent that is none": _tree(parents=(-1, 0, 7)),
    "a parent that is nan": _tree(parents=(-1, math.nan, 1)),
    "depths too small": _tree(depths=(0, 0, 0)),
    "depths too large": _tree(depths=(0, 1, 900)),
    "too few tokens": _tree(tokens=(5, 6)),
    "no node at all": _tree(tokens=(), parents=(), depths=(), sources=()),
}
UNUSABLE: dict[str, Callable[[Any], Any]] = {
    "nan": lambda requests: [DraftTree.chain(5, [math.nan, 6], "x") for _ in requests],
    "ids that do not exist": lambda requests: [DraftTree.chain(5, [97, -1, 10**30], "x") for _ in requests],
}


@pytest.fixture(scope="module")
def plain(directory: Path) -> list[list[int]]:
    return [output.token_ids for output in open_llm(directory, drafter="none").generate([[5, 6, 7], [8]], GREEDY)]


@pytest.mark.parametrize("name", [*GARBAGE, *UNUSABLE])
def test_invalid_drafts_cause_plain_decoding_and_one_warning(
    directory: Path, shared_llm: LLM, plain: list[list[int]], name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_llm.engine, "speculator", shared_llm.engine.speculator)  # restored in the end
    set_drafters(shared_llm, FailingDrafter({**GARBAGE, **UNUSABLE}[name]))
    shared_llm.engine.speculator.policy = FixedDraftLength(4)
    with caplog.at_level(logging.WARNING):
        outputs = shared_llm.generate([[5, 6, 7], [8]], GREEDY) + shared_llm.generate([5, 6, 7], GREEDY)
    assert [output.token_ids for output in outputs] == [*plain, plain[0]]
    reason = SkipReason.UNUSABLE if name in UNUSABLE else SkipReason.DRAFTER_FAILED
    assert [output.speculation.skip_counts[reason] for output in outputs] == [10, 10, 10]  # the first token and the last are plain anyway
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (name in GARBAGE)
    assert all("a drafter failed" in warning for warning in warnings)
    monkeypatch.undo()
    assert_usable(shared_llm)


@pytest.mark.parametrize("change", [list.clear, lambda ids: ids.__setitem__(slice(-4, None), [9] * 8)], ids=["clear", "replace"])
def test_drafter_that_removes_tokens_fails_the_request(llm: LLM, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine, "speculator", llm.engine.speculator)  # restored in the end
    set_drafters(llm, FailingDrafter(lambda requests: [change(one.token_ids) for one in requests]))
    llm.engine.speculator.policy = FixedDraftLength(4)
    prompt = [5, 6, 7] * 21
    with raises(PacelineError, "the drafter failing removed or replaced tokens of this request"):
        llm.generate([prompt], GREEDY)
    monkeypatch.undo()
    outputs = [llm.generate([prompt], GREEDY, cache_salt=salt)[0] for salt in (None, str(change))]
    assert outputs[0].token_ids == outputs[1].token_ids


def test_drafter_that_appends_tokens_changes_no_output(
    shared_llm: LLM, plain: list[list[int]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_llm.engine, "speculator", shared_llm.engine.speculator)  # restored in the end
    set_drafters(shared_llm, FailingDrafter(lambda requests: [one.token_ids.append(9) for one in requests]))
    shared_llm.engine.speculator.policy = FixedDraftLength(4)
    assert [output.token_ids for output in shared_llm.generate([[5, 6, 7], [8]], GREEDY)] == plain
    assert "failing changed Request.token_ids" in caplog.text


def test_damaged_draft_model_causes_plain_steps(
    directory: Path, copy: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_always(monkeypatch)
    change_weights(copy, lambda weights: weights["model.norm.weight"].fill(np.nan))
    llm = open_llm(directory, drafter=str(copy))
    outputs = llm.generate([[5, 6, 7], [8]], GREEDY)
    assert [output.token_ids for output in outputs] == plain
    assert all(output.speculation.skip_counts[SkipReason.DRAFTER_FAILED] == 10 for output in outputs)
    drafts = llm.drafter.cache  # type: ignore[union-attr]
    drafts.check_consistency()
    assert drafts.pool.num_free == drafts.pool.num_blocks


class PanicException(BaseException):
    """As the tokenizers library's Rust code raises it."""


class Panicking:
    """The tokenizers library, with methods that panic on demand."""

    def __init__(self, library: Any, method: str) -> None:
        self._library, self._method = library, method

    def __getattr__(self, name: str) -> Any:
        return self._panic if name == self._method else getattr(self._library, name)

    def _panic(self, *_: Any, **__: Any) -> None:
        raise PanicException("index out of bounds: the len is 3 but the index is 7")


@pytest.mark.parametrize("method", ["decode", "id_to_token"])
def test_tokenizer_panic_ends_its_request_alone(llm: LLM, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = llm.tokenizer._backend
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_library_tokenizer", Panicking(backend._library_tokenizer, method))
        if method == "decode":
            with raises(RequestError, "tokenizer cannot decode token ids", "index out of bounds"):
                llm.generate([5, 6, 7], GREEDY)
        with raises(RequestError, "the model's tokenizer cannot"):
            list(llm.stream([5, 6, 7], GREEDY))
        with raises(RequestError, "the model's tokenizer cannot"):
            llm.generate([5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True, stop=("never said",)))


# How long a text may be


def test_too_long_prompt_error_gives_advice_that_works(directory: Path) -> None:
    """Following the error's advice works and does not lead to an earlier error."""
    with raises(RequestError, "maximum context length is 64 tokens", "shorten the prompt or raise max_model_len"):
        open_llm(directory, max_model_len=64).generate([[5] * 64])
    assert len(open_llm(directory, max_model_len=65).generate([[5] * 64], GREEDY)[0].token_ids) == 1
    with raises(CapacityError, "the cache of 64 tokens", "shorten the prompt, lower max_tokens or raise kv_cache_gb"):
        open_llm(directory, kv_cache_gb=2 * BLOCK_BYTES / 1e9).generate([[5] * 64])


def test_too_long_prompt_of_a_longrope_model_names_max_model_len(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, "rope_theta": 10000.0, **factors}
    path = write_checkpoint(tmp_path, "phi3", num_hidden_layers=1, sliding_window=None)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "original_max_position_embeddings": 64, "rope_parameters": rope}))
    with raises(RequestError, "maximum context length is 64 tokens", "shorten the prompt or raise max_model_len"):
        open_llm(path).generate([[5] * 64])
    assert open_llm(path, max_model_len=512).generate([[5] * 64], GREEDY)[0].token_ids
