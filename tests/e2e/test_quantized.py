"""Quantised targets and drafts through the public class, and changing the quantisation of a loaded one: all of it or nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline.llm
from harness.checkpoints import write_checkpoint
from paceline import LLM, CapacityError, CheckpointError, ConfigError, SamplingParams
from paceline.config import QuantOptions
from paceline.models.storage.quantized_cache import CACHE_FOLDER

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
PROMPT = "the cat sat on"
Open = Callable[..., LLM]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def open_llm(directory: Path) -> Open:
    def open_llm(**options: Any) -> LLM:
        options = {"threads": 1, "device": "cpu", "kv_cache_gb": 0.02, "drafter": "none", "numerics": "fast", **options}
        return LLM(str(options.pop("model", directory)), **options)

    return open_llm


def ids(llm: LLM, params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate(PROMPT, params)[0].token_ids


def test_quantised_target_gives_the_same_text_every_time(open_llm: Open) -> None:
    stored = ids(open_llm())
    for quantization in ("int8", "int4", QuantOptions(bits=4, group=32, embedding_bits=4, lm_head_bits=4)):
        first, second = (ids(open_llm(quantization=quantization), SAMPLED) for _ in range(2))
        assert first == second
    coarse = open_llm(quantization=QuantOptions(bits=4, embedding_bits=4, lm_head_bits=4))
    assert ids(coarse) != stored


def test_quantised_weights_are_cached(open_llm: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    first = ids(open_llm(quantization="int4"))
    (kept,) = (tmp_path / CACHE_FOLDER).iterdir()
    written = kept.stat().st_mtime_ns
    assert ids(open_llm(quantization="int4")) == first
    assert [path.stat().st_mtime_ns for path in (tmp_path / CACHE_FOLDER).iterdir()] == [written]


def test_requantize_equals_loading_with_that_quantization(open_llm: Open) -> None:
    stored, int4 = ids(open_llm(), SAMPLED), ids(open_llm(quantization="int4"), SAMPLED)
    llm = open_llm()
    old_runtime, old_cache = llm.runtime, llm.engine.cache
    for quantization, expected in (("int4", int4), ("none", stored), ("int4", int4)):
        llm.requantize(quantization)
        assert ids(llm, SAMPLED) == expected
        llm.engine.cache.check_consistency()
        assert llm.engine.cache.pool.num_free == llm.engine.cache.pool.num_blocks
    assert llm.runtime is not old_runtime
    assert llm.engine.cache is not old_cache


def test_drafter_works_after_requantize(open_llm: Open) -> None:
    llm = open_llm(drafter="ngram")
    drafter = llm.drafter
    ids(llm)
    llm.requantize("int8")
    assert llm.drafter is drafter
    assert llm.drafter_name == "ngram"
    assert ids(llm) == ids(open_llm(quantization="int8", drafter="ngram"))


@pytest.fixture
def failing_llm(open_llm: Open) -> Iterator[LLM]:
    """An LLM that must come out of a test as it was."""
    llm = open_llm(quantization="int8")
    before = (llm.engine, llm.runtime, llm.notices, ids(llm, SAMPLED))
    yield llm
    assert (llm.engine, llm.runtime, llm.notices, ids(llm, SAMPLED)) == before


@pytest.mark.parametrize("error", [CapacityError("no memory"), MemoryError(), KeyboardInterrupt()], ids=lambda one: type(one).__name__)
def test_failed_requantize_keeps_the_old_target(failing_llm: LLM, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **_options: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(paceline.llm, "load_engine", fail)
        with pytest.raises(type(error)):
            failing_llm.requantize("int4")


def test_missing_checkpoint_keeps_the_old_target(open_llm: Open, tmp_path: Path) -> None:
    llm = open_llm(model=write_checkpoint(tmp_path / "moved", "llama", num_hidden_layers=1))
    before = (llm.engine, ids(llm))
    (tmp_path / "moved" / "model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError):
        llm.requantize("int4")
    assert (llm.engine, ids(llm)) == before


def test_requantize_with_an_unknown_setting_keeps_the_model(failing_llm: LLM) -> None:
    with pytest.raises(ConfigError, match="quantization is 'int5': use one of none, int8, int4"):
        failing_llm.requantize("int5")


def test_requantize_with_a_running_stream_is_refused(failing_llm: LLM) -> None:
    expected = ids(failing_llm)
    stream = failing_llm.stream(PROMPT, GREEDY)
    next(stream)
    with pytest.raises(ConfigError, match="while a request is running: finish its stream or close it first"):
        failing_llm.requantize("int4")
    output = list(stream)[-1].output
    assert output is not None
    assert output.token_ids == expected


def test_requantize_after_a_closed_stream_works(open_llm: Open) -> None:
    llm = open_llm()
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    stream.close()
    llm.requantize("int4")
    assert ids(llm) == ids(open_llm(quantization="int4"))
