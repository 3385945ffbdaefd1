"""Everything that can go wrong is one clear error of the right class, and nothing is left behind."""

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
from harness.checkpoints import write_checkpoint, write_tokenizer
from paceline import LLM, SamplingParams
from paceline.errors import (
    BackendUnavailableError,
    CapacityError,
    CheckpointError,
    ConfigError,
    IncompatibleDrafterError,
    PacelineError,
    RequestError,
)
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import Drafter
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
BLOCK_BYTES = 16384  # of the tiny checkpoint
NAN_ID = 95


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
    llm.engine.cache.check()
    assert llm.engine.cache.pool.num_free == llm.engine.cache.pool.num_blocks
    outputs = [llm.generate([5, 6, 7], GREEDY)[0].token_ids for _ in range(2)]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 12


def raises(kind: type[PacelineError], *parts: object) -> Any:
    """One error of exactly this class whose text has all `parts`."""
    pattern = "".join(f"(?=.*{re.escape(str(part))})" for part in parts)
    return pytest.raises(kind, match=re.compile(pattern, re.DOTALL), check=lambda error: type(error) is kind)


# The model


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with raises(CheckpointError, tmp_path / "nowhere", "give a directory"):
        open_llm(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with raises(CheckpointError, copy, name):
        open_llm(copy)


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, 0.999])
def test_truncated_weights_are_refused(copy: Path, keep: float) -> None:
    file = copy / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with raises(CheckpointError, file, "truncated", "download it again"):
        open_llm(copy)


def test_an_unknown_architecture_is_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"]}))
    with raises(CheckpointError, "gpt_bigcode", "llama"):
        open_llm(copy)


def change_weights(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    from safetensors.numpy import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def test_nan_everywhere_is_found_at_load_and_says_nothing_about_the_machine(
    directory: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test of the machine must not learn from a damaged file what it would then believe of a good one."""
    expected = open_llm(directory).numerics
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "facts"))
    change_weights(copy, lambda weights: weights["model.norm.weight"].fill(np.nan))
    with raises(CheckpointError, "NaN", "verify the checkpoint's files"):
        open_llm(copy)
    assert open_llm(directory).numerics == expected


def test_nan_in_one_row_ends_the_requests_that_meet_it(copy: Path) -> None:
    change_weights(copy, lambda weights: weights["model.embed_tokens.weight"][NAN_ID].fill(np.nan))
    llm = open_llm(copy, numerics="fast")
    expected = llm.generate([5, 6, 7], GREEDY)[0].token_ids
    with raises(CheckpointError, "NaN", "verify the checkpoint's files"):
        llm.generate([[5, 6], [5, NAN_ID], [7]], GREEDY)
    with raises(CheckpointError, "NaN"):
        list(llm.stream([5, NAN_ID], GREEDY))
    assert_usable(llm)
    assert llm.generate([5, 6, 7], GREEDY)[0].token_ids == expected


# Settings


@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [
        ("numerics", "exakt", "exact, fast"),
        ("dtype", "int3", "bf16"),
        ("device", "tpu", "auto, cpu, cuda"),
        ("max_model_len", 513, "512"),
        ("kv_cache_gb", 0, "above 0"),
        ("kv_cache_gb", "2", "above 0"),
        ("num_speculative_tokens", 0, "from 1 to 64"),
        ("num_speculative_tokens", "many", "auto"),
        ("drafter", [], "ngram"),
        ("drafter", None, "ngram"),
        ("drafter", ["ngram", 5], "ngram"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(directory: Path, name: str, value: object, way_out: str) -> None:
    with raises(ConfigError, name, tuple(value) if isinstance(value, list) else value, way_out):
        open_llm(directory, **{name: value})


def test_a_cache_too_small_is_a_capacity_error(directory: Path) -> None:
    with raises(CapacityError, "holds no block of 16384 bytes", "raise kv_cache_gb"):
        open_llm(directory, kv_cache_gb=0.5 * BLOCK_BYTES / 1e9)
    with raises(CapacityError, "512 tokens", "lower max_model_len or raise kv_cache_gb"):
        open_llm(directory, kv_cache_gb=4 * BLOCK_BYTES / 1e9, max_model_len=512)


def test_cuda_without_a_gpu_is_a_missing_backend(directory: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with raises(BackendUnavailableError, "cuda", "cpu"):
        open_llm(directory, device="cuda")


def test_a_drafter_that_is_none_is_refused_with_the_names_there_are(directory: Path, tmp_path: Path) -> None:
    with raises(IncompatibleDrafterError, "ngrm", "auto, none, ngram, suffix, prediction, draft_model"):
        open_llm(directory, drafter="ngrm")
    with raises(IncompatibleDrafterError, directory, "no embedded draft model", "directory or id"):
        open_llm(directory, drafter="draft_model")
    with raises(IncompatibleDrafterError, "none", "use 'none' alone"):
        open_llm(directory, drafter=["ngram", "none"])


def test_a_draft_model_with_another_vocabulary_works_and_says_how_much_of_it_is_shared(directory: Path, copy: Path) -> None:
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["▁cat"], vocab["▁dog"] = vocab["▁dog"], vocab["▁cat"]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    llm = open_llm(directory, drafter=str(copy))
    assert "overlapping" in llm.banner
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert llm.generate(["the cat"], params)[0].token_ids == open_llm(directory).generate(["the cat"], params)[0].token_ids


# Requests


@pytest.mark.parametrize(
    "prompt",
    [None, 5, "", [], [[]], ["the", ""], [-1], [97], [10**30], [1.0], [True], [None], [[1, 2], 5], ["a", 5], b"abc", [np.float32(1)]],
    ids=repr,
)
def test_a_wrong_prompt_is_refused_before_anything_runs(llm: LLM, prompt: Any) -> None:
    passes = llm.runtime.num_passes
    with raises(RequestError, "prompt") as caught:
        llm.generate(prompt, GREEDY)
    assert caught.value.parameter == "prompt"
    assert llm.runtime.num_passes == passes


def test_an_id_out_of_range_is_named_with_the_range(llm: LLM) -> None:
    with raises(RequestError, "id 97", "0 to 96"):
        llm.generate([5, 97], GREEDY)
    with raises(RequestError, "id 97", "0 to 96"):
        llm.stream([5, 97], GREEDY)


@pytest.mark.parametrize("messages", [None, [], [[]], "hi", [{"role": "robot", "content": "x"}]], ids=repr)
def test_wrong_messages_are_refused(llm: LLM, messages: Any) -> None:
    with raises(RequestError, "messages") as caught:
        llm.chat(messages, GREEDY)
    assert caught.value.parameter == "messages"


def test_a_prompt_as_long_as_the_context_is_refused(llm: LLM) -> None:
    with raises(
        RequestError, "512 tokens > 511 maximum", "context length is 512 tokens", "shorten the prompt (the model was made for 512 tokens)"
    ):
        llm.generate([[5], [5] * 512], GREEDY)


def test_an_id_of_a_parameter_out_of_range_leaves_nothing_behind(llm: LLM) -> None:
    with raises(RequestError, "97", "96"):
        llm.generate([[5], [6]], SamplingParams(stop_token_ids=[97]))


@pytest.mark.parametrize("parameter", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"])
@pytest.mark.parametrize("value", [-2, 1e30, "much"])
def test_absurd_sampling_values_are_refused(parameter: str, value: Any) -> None:
    with raises(RequestError, parameter) as caught:
        SamplingParams(**{parameter: value})
    assert caught.value.parameter == parameter


def test_a_request_with_everything_banned_is_refused_by_name(llm: LLM) -> None:
    with raises(RequestError, "no token is left", "banned_token_ids", "allow more") as caught:
        llm.generate(["the cat", "a dog"], SamplingParams(banned_token_ids=list(range(97))))
    assert caught.value.parameter == "banned_token_ids"


def test_a_request_larger_than_the_cache_is_refused_before_anything_runs(directory: Path) -> None:
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
def test_a_stream_that_is_closed_midway_frees_everything(llm: LLM, count: int) -> None:
    stream = llm.stream([7] * 300, GREEDY)
    for _ in range(count):
        next(stream)
    stream.close()


class FailingDrafter(Drafter):
    """Does as it is told; fails nowhere but there."""

    name = "failing"

    def __init__(self, propose: Callable[..., Any], *, fails_in: str = "propose") -> None:
        self._propose = propose
        self._fails_in = fails_in

    def propose(self, requests: Any, budgets: Any) -> Any:
        return self._propose(requests)

    def observe(self, rows: Any) -> None:
        if self._fails_in == "observe":
            raise RuntimeError("observe")

    def release(self, request: Any) -> None:
        if self._fails_in == "release":
            raise RuntimeError("release")


def test_an_interrupt_frees_everything(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_garbage_from_a_drafter_means_plain_steps_and_one_warning(
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


@pytest.mark.parametrize("where", ["observe", "release"])
def test_a_drafter_that_fails_elsewhere_harms_nobody(
    directory: Path, plain: list[list[int]], where: str, caplog: pytest.LogCaptureFixture
) -> None:
    llm = open_llm(directory, drafter=FailingDrafter(lambda requests: [None] * len(requests), fails_in=where))
    with caplog.at_level(logging.WARNING):
        assert [output.token_ids for output in llm.generate([[5, 6, 7], [8]], GREEDY)] == plain
    assert [record.getMessage().count(where) for record in caplog.records] == [1]
    assert_usable(llm)


def test_a_draft_model_that_is_damaged_costs_its_guesses_only(
    directory: Path, copy: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_always(monkeypatch)
    change_weights(copy, lambda weights: weights["model.norm.weight"].fill(np.nan))
    llm = open_llm(directory, drafter=str(copy))
    outputs = llm.generate([[5, 6, 7], [8]], GREEDY)
    assert [output.token_ids for output in outputs] == plain
    assert all(output.speculation.skip_counts[SkipReason.DRAFTER_FAILED] == 10 for output in outputs)
    drafts = llm.drafter.cache  # type: ignore[union-attr]
    drafts.check()
    assert drafts.pool.num_free == drafts.pool.num_blocks


def test_a_smaller_vocabulary_of_the_same_pieces_is_no_error(directory: Path, tmp_path: Path, plain: list[list[int]]) -> None:
    draft = write_checkpoint(tmp_path, "llama", num_hidden_layers=1, vocab_size=60)
    write_tokenizer(draft, 60)
    llm = open_llm(directory, drafter=str(draft))
    assert [output.token_ids for output in llm.generate([[5, 6, 7], [8]], GREEDY)] == plain
    assert llm.generate([90, 91], GREEDY)[0].speculation.skip_counts[SkipReason.DRAFTER_FAILED] == 0
    assert_usable(llm)


class PanicException(BaseException):
    """As the tokenizers library's Rust code raises it."""


class Panicking:
    """The tokenizers library, until a method of it is told to panic."""

    def __init__(self, library: Any, method: str) -> None:
        self._library, self._method = library, method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            raise PanicException("index out of bounds: the len is 3 but the index is 7")
        return getattr(self._library, name)


@pytest.mark.parametrize("method", ["decode", "id_to_token"])
def test_a_text_that_makes_the_tokenizer_panic_ends_its_request_alone(llm: LLM, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = llm.tokenizer._backend
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_library", Panicking(backend._library, method))
        if method == "decode":
            with raises(RequestError, "tokenizer cannot decode token ids", "index out of bounds"):
                llm.generate([5, 6, 7], GREEDY)
        with raises(RequestError, "the model's tokenizer cannot"):
            list(llm.stream([5, 6, 7], GREEDY))
        with raises(RequestError, "the model's tokenizer cannot"):
            llm.generate([5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True, stop=("never said",)))


def test_a_prompt_that_makes_the_tokenizer_panic_is_a_request_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pretrained = llm.tokenizer._pretrained

    def panic(*_: object, **__: object) -> None:
        raise PanicException("Onig: Regex search error: retry-limit-in-match over")

    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "encode", panic)
        for call in (lambda: llm.generate("the cat", GREEDY), lambda: llm.chat([{"role": "user", "content": "hi"}], GREEDY)):
            with raises(RequestError, "tokenizer cannot encode this text", "retry-limit-in-match"):
                call()


# How long a text may be


def test_a_text_too_long_is_told_the_one_way_out_that_there_is(directory: Path) -> None:
    """Whoever follows it gets further, and is never sent back."""
    with raises(RequestError, "maximum context length is 64 tokens", "shorten the prompt or raise max_model_len"):
        open_llm(directory, max_model_len=64).generate([[5] * 64])
    assert len(open_llm(directory, max_model_len=65).generate([[5] * 64], GREEDY)[0].token_ids) == 1
    with raises(CapacityError, "the cache of 64 tokens", "shorten the prompt, lower max_tokens or raise kv_cache_gb"):
        open_llm(directory, kv_cache_gb=2 * BLOCK_BYTES / 1e9).generate([[5] * 64])


def test_a_context_that_may_grow_with_other_frequencies_is_told_so(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, "rope_theta": 10000.0, **factors}
    path = write_checkpoint(tmp_path, "phi3", num_hidden_layers=1, sliding_window=None)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "original_max_position_embeddings": 64, "rope_parameters": rope}))
    with raises(RequestError, "maximum context length is 64 tokens", "shorten the prompt or raise max_model_len"):
        open_llm(path).generate([[5] * 64])
    assert open_llm(path, max_model_len=512).generate([[5] * 64], GREEDY)[0].token_ids
