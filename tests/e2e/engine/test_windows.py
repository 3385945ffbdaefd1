"""Long texts with sliding-window layers: cached rows, prefix hits, and no leaked blocks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.always_drafts import draft_always
from harness.checkpoints import write_checkpoint
from harness.eagle_checkpoints import EAGLE3, eagle3_tensors, write_head
from harness.engine_targets import make
from harness.engine_traffic import check_clean
from harness.expert_checkpoints import CASES
from harness.gemma4_assistants import write_assistant, write_target
from harness.layer_caches import check_window
from harness.native_network import BUILT
from paceline import LLM, SamplingParams
from paceline.kv_cache.cache import BLOCK_SIZE
from paceline.kv_cache.sliding_window import SlidingWindowCache
from paceline.runtimes.native.network import NativeNetwork

WINDOW = 64
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
Open = Callable[..., LLM]
pytestmark = pytest.mark.skipif(not BUILT, reason="no native kernels for this machine")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = {"num_hidden_layers": 2, "sliding_window": WINDOW, "max_position_embeddings": 40_000}
    return write_checkpoint(tmp_path_factory.mktemp("mistral"), "mistral", **values)


@pytest.fixture
def open_llm(directory: Path) -> Iterator[Open]:
    opened: list[LLM] = []

    def open_it(**options: Any) -> LLM:
        given = {"device": "cpu", "drafter": "ngram", "kv_cache_gb": 0.2, "max_num_seqs": 4, "max_model_len": 34_000, **options}
        opened.append(LLM(str(directory), **given))
        return opened[-1]

    yield open_it
    for llm in opened:
        llm.close()


def memory_of(llm: LLM) -> SlidingWindowCache:
    (memory,) = (memory for memory in llm.engine.cache.layer_caches if isinstance(memory, SlidingWindowCache))
    return memory


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 90, length).tolist()


def test_windowed_cache_of_a_long_text_stays_at_window_plus_one_pass(
    open_llm: Open, large_counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, most = 32_000 if large_counts else 3_000, [0]
    keep_path = SlidingWindowCache.keep_path

    def watched(memory: SlidingWindowCache, plan: Any, commit: Any) -> None:
        table = memory._tables[plan.sequence_id]
        most[0] = max(most[0], table.end - table.first)
        keep_path(memory, plan, commit)

    with monkeypatch.context() as patch:
        patch.setattr(SlidingWindowCache, "keep_path", watched)
        llm = open_llm()
        (held,) = llm.generate([prompt_of(length)], GREEDY)
    assert 0 < most[0] * BLOCK_SIZE <= WINDOW + 1024
    assert memory_of(llm).num_bytes < llm.engine.cache.max_slots * 2 * 2 * 2 * 16 * 4 / 10
    check_clean(llm)
    monkeypatch.setattr(NativeNetwork, "has_window_eviction", False)
    (everything,) = open_llm(drafter="none").generate([prompt_of(length)], GREEDY)
    assert held.token_ids == everything.token_ids


def test_continued_conversations_of_windowed_models_hit_the_prefix_cache(open_llm: Open) -> None:
    llm, alone = open_llm(max_num_seqs=1), open_llm(enable_prefix_caching=False)
    talk = prompt_of(900)
    for count in (900, 940, 300, 33, 901, 64, 970):
        prompt = [*talk, *prompt_of(70, 1)][:count]
        (found,), (expected,) = llm.generate([prompt], GREEDY), alone.generate([prompt], GREEDY)
        assert found.token_ids == expected.token_ids, count
        if count in (940, 970):
            assert found.usage.num_cached_tokens >= 896
        check_window(memory_of(llm))
        check_clean(llm)


@pytest.mark.parametrize("drafter", ["ngram", "eagle3"])
def test_profiled_passes_larger_than_any_step_do_not_fail(open_llm: Open, tmp_path: Path, drafter: str) -> None:
    """Passes are profiled with more rows and sequences than the steps of this engine will have."""
    smallest = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "prefill_chunk_size": 1}
    if drafter == "eagle3":
        values = {**EAGLE3, "hidden_size": 64, "head_dim": 16, "rope_theta": 1e6, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        drafter = str(write_head(tmp_path, values, eagle3_tensors(values, target_hidden=64)))
    llm = open_llm(drafter=drafter, num_speculative_tokens=60, tree_width=8, **smallest)
    plain = open_llm(drafter="none")
    assert llm.generate([prompt_of(200)], GREEDY)[0].token_ids == plain.generate([prompt_of(200)], GREEDY)[0].token_ids
    check_clean(llm)


@dataclass(frozen=True)
class Windowed:
    """A model some of whose layers see a window, its drafter, and the room for three texts at most."""

    model: Path
    drafter: str
    kv_cache_gb: float


@pytest.fixture
def windowed(request: pytest.FixtureRequest, directory: Path, tmp_path: Path) -> Windowed:
    if request.param == "gpt_oss":
        family, values = CASES["gpt_oss"]
        return Windowed(write_checkpoint(tmp_path, family, **values), "ngram", 0.001)
    if request.param == "gemma4":
        return Windowed(write_target(tmp_path / "target"), str(write_assistant(tmp_path / "assistant")), 0.0015)
    return Windowed(directory, "ngram", 0.002)


@pytest.mark.spread(0.3)
@pytest.mark.parametrize("windowed", ["mistral", "gpt_oss", "gemma4"], indirect=True)
def test_aborted_requests_of_windowed_models_free_all_blocks(
    windowed: Windowed, seed: int, large_counts: bool, tally: "dict[str, int]", monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_always(monkeypatch)
    options = {"kv_cache_gb": windowed.kv_cache_gb, "max_model_len": 400, "max_num_seqs": 3}
    llm, random = LLM(str(windowed.model), drafter=windowed.drafter, device="cpu", **options), np.random.default_rng(seed)
    memory, count = memory_of(llm), 10_000 if large_counts else 300
    for number in range(count):
        request = make(llm, prompt_of(int(random.integers(1, 300)), int(random.integers(3))), GREEDY)
        llm.engine.add_request(request)
        for _ in range(int(random.integers(0, 6))):
            llm.engine.step()
        if random.random() < 0.9:
            llm.engine.abort_request(request)
        if number % 50 == 0:
            llm.engine.step()
            llm.engine.cache.check_consistency()
            check_window(memory)
    while not llm.engine.is_idle:
        llm.engine.step()
    tally["requests over windows, most of them aborted"] += count
    check_window(memory)
    check_clean(llm)
    assert memory.pool.num_free == memory.storage.shape[1]
    assert llm.stats().drafter_failures == 0
    assert llm.stats().speculation.num_draft_tokens > 0
    llm.close()
