"""Gemma 4 in the engine: caches of its layers of two sizes, no leaked blocks, and ids that it must not emit."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.engine_traffic import check_clean
from harness.gemma4_checkpoints import write_gemma4
from harness.layer_caches import check_window
from harness.native_network import BUILT
from paceline import LLM, SamplingParams
from paceline.kv_cache.cache import BLOCK_SIZE
from paceline.kv_cache.sliding_window import SlidingWindowCache
from paceline.proof.checkpoint_facts import read_checkpoint_facts
from paceline.proof.memory_estimate import estimate_memory
from paceline.runtimes.native.network import NativeNetwork

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
GLOBAL_ROW = 2 * 2 * 32 * 4  # keys and values of 2 layers, one head of 32 numbers
LOCAL_ROW = 3 * 2 * 2 * 16 * 4  # of 3 layers, two heads of 16
Open = Callable[..., LLM]
pytestmark = pytest.mark.skipif(not BUILT, reason="no native kernels for this machine")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers: three local and two global ones keep something, the other three read it."""
    return write_gemma4(tmp_path_factory.mktemp("gemma4"), max_position_embeddings=40_000)


@pytest.fixture
def open_llm(directory: Path) -> Iterator[Open]:
    opened: list[LLM] = []

    def open_it(path: Path = directory, **options: Any) -> LLM:
        given = {"device": "cpu", "drafter": "ngram", "kv_cache_gb": 0.01, "max_num_seqs": 2, "max_model_len": 2_000, **options}
        opened.append(LLM(str(path), **given))
        return opened[-1]

    yield open_it
    for llm in opened:
        llm.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 90, length).tolist()


def test_gemma4_cache_stores_global_layers_whole_and_windows_of_local_ones(open_llm: Open) -> None:
    smallest = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "prefill_chunk_size": 64}
    llm = open_llm(drafter="none", kv_cache_gb=0.006, max_model_len=None, **smallest)
    (local,) = (memory for memory in llm.engine.cache.layer_caches if isinstance(memory, SlidingWindowCache))
    (whole,) = (memory for memory in llm.engine.cache.layer_caches if memory is not local)
    num_blocks = llm.engine.cache.pool.num_blocks
    assert whole.num_bytes == num_blocks * BLOCK_SIZE * GLOBAL_ROW
    assert local.num_bytes == local.storage.shape[1] * BLOCK_SIZE * LOCAL_ROW
    assert 0.9 * 0.006e9 < llm.engine.cache.num_bytes <= 0.006e9
    assert local.storage.shape[1] < num_blocks / 4
    (output,) = llm.generate([prompt_of(3_000)], GREEDY)
    assert len(output.token_ids) == 20
    check_clean(llm)
    check_window(local)
    assert local.pool.num_free == local.storage.shape[1]


def test_window_eviction_and_drafting_change_no_gemma4_token(open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt_of(700), prompt_of(40, 1), [*prompt_of(700), 3, 4]]
    held, drafted = (open_llm(drafter=drafter).generate(prompts, GREEDY) for drafter in ("none", "ngram"))
    monkeypatch.setattr(NativeNetwork, "has_window_eviction", False)
    everything = open_llm(drafter="none").generate(prompts, GREEDY)
    for one, other, expected in zip(held, drafted, everything, strict=True):
        assert one.token_ids == other.token_ids == expected.token_ids


def test_doctor_counts_cache_memory_by_layer_type(directory: Path) -> None:
    memory = estimate_memory(read_checkpoint_facts(directory), None, "cpu", [])
    assert memory.cache_bytes_per_1k == 1000 * (GLOBAL_ROW + LOCAL_ROW)
    assert memory.cache_bytes(30_000) - memory.cache_bytes(29_000) == 1000 * GLOBAL_ROW


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_suppress_tokens_of_generation_config_are_never_sampled(open_llm: Open, directory: Path, tmp_path: Path, drafter: str) -> None:
    (free,) = open_llm(drafter=drafter).generate([prompt_of(50)], GREEDY)
    said = sorted(set(free.token_ids))[:3]
    shutil.copytree(directory, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"suppress_tokens": [*said, 10**6]}), encoding="utf-8")
    held = open_llm(tmp_path / "model", drafter=drafter)
    for params in (GREEDY, SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.5, banned_token_ids=(3,))):
        (output,) = held.generate([prompt_of(50)], params)
        assert not {*said, *params.banned_token_ids} & set(output.token_ids)
