"""Promise 1 with X-LoRA, whose rows run twice: tokens do not depend on drafts, batch, shared prompts or the cache.

With our kernels so do their logprobs, bit by bit. By torch rows may differ in their last bits between passes of other shapes; tokens of
these texts do not.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.adapter_files import write_adapter_of
from harness.adapters import Asked, assert_equal, run_together
from harness.engine_jobs import BEYOND, TREES, make_drafter
from harness.engine_traffic import check_clean
from harness.exact_targets import skip_without_kernels
from harness.xlora_files import write_xlora
from paceline import LLM, ConfigError, SamplingParams
from paceline.kv_cache.block_pool import BlockPool
from paceline.kv_cache.full_attention import FullAttentionCache
from paceline.models.checkpoint import read_model_config
from paceline.runtimes.native import network as native_network
from paceline.runtimes.torch import network as torch_network
from paceline.runtimes.torch.network import TorchNetwork
from paceline.speculation.draft_length.policy import FixedDraftLength

BLOCK, MAX_CONTEXT, NUM_BLOCKS = 32, 128, 11  # fewer blocks than eight texts take
DRAFTERS = ["none", "ngram", "suffix_tree", "oracle", "chaos"]
BY_TORCH = ("chaos",)  # with small counts: these passes take long


@dataclass(frozen=True)
class Given:
    """A target with two X-LoRA adapters and a plain one, and requests for all of them."""

    backend: str
    target: Path
    adapters: dict[str, Path]
    asked: list[Asked]

    def open(self, kind: str = "none", *, num_blocks: int = NUM_BLOCKS, **options: Any) -> LLM:
        config = read_model_config(self.target)
        row_bytes = 2 * 4 * 2 * config.num_layers * config.attention.kv_size  # two sets of keys and values
        known = {(tuple(one.prompt), one.params.seed or 0): one.beyond for one in self.asked}
        llm = LLM(
            str(self.target),
            drafter=make_drafter(kind, known, config.vocab_size, self.target),
            adapters=self.adapters,
            **{
                "backend": self.backend, "device": "cpu", "dtype": "f32", "threads": 1, "max_model_len": MAX_CONTEXT,
                "num_speculative_tokens": 4, "kv_cache_gb": (num_blocks + 0.5) * BLOCK * row_bytes / 1e9, **options,
            },
        )  # fmt: skip
        llm.engine.speculator.policy = FixedDraftLength(4, max_rows=12 if kind in TREES else None)
        scheduler = llm.engine.scheduler
        scheduler.limits = replace(
            scheduler.limits, spare_blocks=0, prefill_chunk_size=40
        )  # so that requests are preempted, and prompts cut
        return llm


@pytest.fixture(scope="module", params=["native", "torch"])
def given(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Given]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if request.param == "native":
        skip_without_kernels()
    target, folder = checkpoint("llama"), tmp_path_factory.mktemp("xlora")
    config = read_model_config(target)
    adapters = {
        "mix": write_xlora(folder / "mix", config, seed=1),
        "layers": write_xlora(folder / "layers", config, seed=2, layerwise_scalings=True, scaling_pass_value=0.3, xlora_depth=2),
        "plain": write_adapter_of(config, folder / "plain", seed=3),
    }
    made, random = Given(request.param, target, adapters, []), np.random.default_rng(7)
    llm = made.open(num_blocks=40, enable_prefix_caching=False)
    heads = [random.integers(1, config.vocab_size, 58).tolist() for _ in range(2)]  # answers go into a block of their own
    for number, adapter in enumerate([None, "mix", "layers", "plain", "mix", "layers", "mix", None]):
        prompt = [*heads[number % 3 == 1], *random.integers(1, config.vocab_size, 1 + number % 2).tolist()]
        params = SamplingParams(max_tokens=12, temperature=0.9 * (number % 2), seed=number, ignore_eos=True, logprobs=2)
        (answer,) = llm.generate([prompt], params, adapter=adapter)
        (longer,) = llm.generate([prompt], replace(params, max_tokens=12 + BEYOND), adapter=adapter)
        made.asked.append(Asked(prompt, params, adapter, answer, longer.token_ids))
    assert llm.stats().num_mixture_passes == 12 * 5 + (12 + BEYOND) * 5 + 10  # a further chunk of each prompt
    yield made
    llm.close()
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_batched_requests_with_x_lora_and_adapters_equal_each_alone(kind: str, given: Given, large_counts: bool) -> None:
    if given.backend == "torch" and kind not in BY_TORCH and not large_counts:
        pytest.skip("large counts only")
    assert len({tuple(one.answer.token_ids) for one in given.asked}) > len(given.asked) // 2  # adapters matter
    llm = given.open(kind)
    assert_equal(llm, run_together(llm, given.asked, preempt_every=6), given.asked)
    again = run_together(llm, given.asked[::-1])  # now their prompts may be known
    assert_equal(llm, again, given.asked[::-1])
    stats = llm.stats()
    assert stats.num_preemptions > 0
    assert sum(request.num_cached_tokens for request in again) > 0
    assert 0 < stats.num_mixture_passes <= stats.num_steps
    check_clean(llm)
    if kind in ("oracle", "chaos"):
        assert stats.speculation.num_accepted_tokens > 0


def test_only_xlora_steps_run_a_scaling_pass(given: Given) -> None:
    llm = given.open("oracle", num_blocks=40)
    asked = {one.adapter: one for one in given.asked[:4]}
    for adapter, one in asked.items():
        before = llm.stats()
        (output,) = llm.generate([one.prompt], one.params, adapter=adapter)
        after = llm.stats()
        assert output.token_ids == one.answer.token_ids
        num_steps = after.num_steps - before.num_steps
        assert num_steps < 12  # drafts were accepted
        assert after.num_mixture_passes - before.num_mixture_passes == (num_steps if adapter in ("mix", "layers") else 0)
    assert llm.stats().as_dict()["num_mixture_passes"] > 0


def test_x_lora_prefix_cache_is_shared_within_one_adapter_only(given: Given) -> None:
    llm = given.open(num_blocks=40)
    prompt, params = given.asked[0].prompt, SamplingParams(max_tokens=2)
    for name in (None, "mix", "layers"):
        (output,) = llm.generate([prompt], params, adapter=name)
        assert output.usage.num_cached_tokens == 0
        (output,) = llm.generate([prompt], params, adapter=name)
        assert output.usage.num_cached_tokens == BLOCK


def test_x_lora_loads_later_only_if_planned_at_engine_start(given: Given, checkpoint: Callable[[str], Path]) -> None:
    directory = given.adapters["mix"]
    llm = given.open(num_blocks=40)
    one = next(one for one in given.asked if one.adapter == "mix")
    llm.unload_adapter("mix")
    llm.load_adapter("again", directory)
    assert llm.generate([one.prompt], one.params, adapter="again")[0].token_ids == one.answer.token_ids
    llm.requantize("none")
    assert llm.generate([one.prompt], one.params, adapter="again")[0].token_ids == one.answer.token_ids
    without = LLM(str(given.target), backend=given.backend, device="cpu", dtype="f32", drafter="none", threads=1, max_model_len=MAX_CONTEXT)
    with pytest.raises(ConfigError, match=r"'mix' needs a second set of keys and values, .* to adapters= \(--adapter\)"):
        without.load_adapter("mix", directory)
    assert without.adapters == ()
    assert 2 * without.engine.cache.bytes_per_token == llm.engine.cache.bytes_per_token


def test_x_lora_is_refused_for_models_with_recurrent_layers(given: Given, checkpoint: Callable[[str], Path]) -> None:
    options: dict[str, Any] = {"drafter": "none", "threads": 1, "max_model_len": MAX_CONTEXT, "device": "cpu", "backend": given.backend}
    with pytest.raises(ConfigError, match="would need states of its own, and the model has recurrent layers"):
        LLM(str(checkpoint("lfm3")), adapters={"mix": given.adapters["mix"]}, **options)


def test_x_lora_with_sliding_windows_changes_no_token_or_logprob(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """A prompt far beyond the window, drafted for and known already, is answered as without a drafter and without a cache."""
    skip_without_kernels()
    target = checkpoint("sliding")
    config = read_model_config(target)
    directory = write_xlora(tmp_path, config, seed=4, scaling_pass_value=0.2)
    prompt = np.random.default_rng(1).integers(1, config.vocab_size, 300).tolist()
    options: dict[str, Any] = {"adapters": {"mix": directory}, "threads": 1, "device": "cpu", "backend": "native", "max_model_len": 400}
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1)
    with LLM(str(target), drafter="none", enable_prefix_caching=False, **options) as llm:
        (expected,) = llm.generate([prompt], params, adapter="mix")
    known = {(tuple(prompt), 0): expected.token_ids}
    with LLM(str(target), drafter=make_drafter("chaos", known, config.vocab_size, target), num_speculative_tokens=4, **options) as llm:
        llm.engine.speculator.policy = FixedDraftLength(4, max_rows=12)
        for _ in range(2):
            (found,) = llm.generate([prompt], replace(params, seed=0), adapter="mix")
            assert found.token_ids == expected.token_ids
            assert found.logprobs == expected.logprobs
        assert found.usage.num_cached_tokens > 0
        assert llm.stats().speculation.num_accepted_tokens > 0


# Planted faults


def share_blocks(patch: pytest.MonkeyPatch, llm: LLM) -> None:
    real = BlockPool.block_hashes
    patch.setattr(BlockPool, "block_hashes", lambda index, token_ids, salt, chain, num: real(index, token_ids, b"", chain, num))


def let_scaling_passes_write_what_real_ones_read(patch: pytest.MonkeyPatch, llm: LLM) -> None:
    """As if there were one cache."""
    shared = llm.runtime._shared  # type: ignore[attr-defined]
    if isinstance(llm.runtime, TorchNetwork):
        patch.setattr(shared, "xlora_kv_storage", shared.kv_storage)
    else:
        shared.xlora_program.execution.set_cache(*shared._cache, shared.kv_cache_dtype)


def leave_rows_of_scaling_passes_where_they_are(patch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Kept paths are moved in the real keys and values alone."""
    real, first = FullAttentionCache.keep_path, llm.engine.cache.layer_caches[0]

    def keep_path(memory: FullAttentionCache, plan: Any, commit: Any) -> None:
        if memory is first:
            real(memory, plan, commit)

    patch.setattr(FullAttentionCache, "keep_path", keep_path)


def give_draft_tokens_the_scalings_of_the_root(patch: pytest.MonkeyPatch, llm: LLM) -> None:
    module = torch_network if isinstance(llm.runtime, TorchNetwork) else native_network
    real = module.compute_scalings

    def scalings(classifiers: Any, inputs: Any, batch: Any, run_pass: Any) -> Any:
        found = real(classifiers, inputs, batch, run_pass)
        for number, own in found.items():
            at = 0
            for item in batch.ranges:
                if item.adapter_number == number:
                    own[at : at + item.num_rows] = own[at]
                    at += item.num_rows
        return found

    patch.setattr(module, "compute_scalings", scalings)


FAULTS = [
    (share_blocks, "none"),
    (let_scaling_passes_write_what_real_ones_read, "none"),
    (leave_rows_of_scaling_passes_where_they_are, "chaos"),
    (give_draft_tokens_the_scalings_of_the_root, "oracle"),
]


@pytest.mark.parametrize(("plant", "kind"), FAULTS)
def test_planted_x_lora_faults_are_found(
    plant: Callable[[pytest.MonkeyPatch, LLM], None], kind: str, given: Given, monkeypatch: pytest.MonkeyPatch, large_counts: bool
) -> None:
    if given.backend == "torch" and not large_counts:
        pytest.skip("large counts only")
    llm = given.open(kind)
    plant(monkeypatch, llm)
    requests = [*run_together(llm, given.asked), *run_together(llm, given.asked)]
    with pytest.raises(AssertionError):
        assert_equal(llm, requests, [*given.asked, *given.asked])
