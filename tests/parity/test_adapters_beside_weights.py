"""An unmerged adapter computes the same as the merged model, in float32."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harness.adapters import make_adapter
from harness.checkpoints import write_checkpoint
from harness.exact_targets import skip_without_kernels
from harness.expert_checkpoints import CASES as EXPERTS
from harness.gemma3n_checkpoints import GEMMA3N
from harness.gemma4_checkpoints import GEMMA4
from harness.hybrid_checkpoints import CASES as HYBRIDS
from paceline import BackendUnavailableError, ConfigError, QuantOptions
from paceline.models.adapters.adapter import Adapter, LowRankUpdate
from paceline.models.adapters.merge import MergedWeights, merged_config
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.config import ModelConfig, WeightType
from paceline.models.storage.quantized_cache import quantized_weights
from paceline.models.weights import Weights
from paceline.runtimes.base import FloatArray, Network, assemble_pass
from paceline.runtimes.decoder import decoder
from paceline.runtimes.native.library import kernels_path
from paceline.runtimes.native.network import NativeNetwork
from paceline.runtimes.torch.network import TorchNetwork

TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),  # biases on q, k and v
    "gemma3": ("gemma3_text", {}),  # embedding rows are scaled
    "glm4": ("glm4", {}),  # rotates pairs side by side, and joins gate and up
    "phi3": ("phi3", {}),
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "gemma4": ("gemma4_text", GEMMA4),
    "qwen3_5": HYBRIDS["qwen3_5"],
    "granite": HYBRIDS["granite"],
    "lfm2": HYBRIDS["lfm2"],
    "qwen3_moe": EXPERTS["qwen3_moe"],
    "gpt_oss": EXPERTS["gpt_oss"],  # experts as one parameter, gate and up by turns, with biases
}
MIXTURES = ("qwen3_moe", "gpt_oss")
KINDS: dict[str, dict[str, Any]] = {
    "projections": {"biases": ("q_proj", "down_proj")},
    "tables": {"embedding": True, "lm_head": True, "rank": 7},
    "whole": {"saves": ("embed_tokens", "lm_head")},
    "experts": {"experts": True, "parts": ("gate_proj", "up_proj", "down_proj"), "biases": ("down_proj",)},
}
USUAL = {
    *((target, "projections", "native") for target in ("llama", "qwen2", "glm4", "qwen3_5", "granite", "qwen3_moe")),
    *((target, kind, "native") for target in ("qwen2", "gemma3") for kind in ("tables", "whole")),
    ("llama", "projections", "torch"), ("glm4", "tables", "torch"), ("qwen2", "whole", "torch"),
    *((target, "experts", runtime) for target in MIXTURES for runtime in ("native", "torch")),
}  # fmt: skip
"""What a run with small counts takes; the others come with large ones."""
LENGTH = 40
Make = Callable[[ModelConfig, Weights], Network]
Opened = Callable[[str], tuple[ModelConfig, Weights]]


def native(config: ModelConfig, weights: Weights) -> Network:
    return NativeNetwork(decoder(config), config, weights, num_threads=2, max_model_len=128, supports_adapters=True)


def by_torch(config: ModelConfig, weights: Weights) -> Network:
    return TorchNetwork(decoder(config), config, weights)


RUNTIMES: dict[str, Make] = {"native": native, "torch": by_torch}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    def of(name: str) -> tuple[ModelConfig, Weights]:
        family, values = TARGETS[name]
        directory = write_checkpoint(tmp_path_factory.mktemp(name), family, **{**values, "dtype": "float32", "seed": 3})
        config = read_model_config(directory).for_context(None)
        return config, open_weights(directory, config)

    return of


def log_probs(network: Network, adapter: Adapter | None = None) -> FloatArray:
    """Of all rows of two texts, [2 * LENGTH, V]: in one pass, with an adapter for both; the second one alone has none of another's."""
    number = 0 if adapter is None else network.load_adapter(adapter)
    cache = network.new_cache(8)
    tokens = np.random.default_rng(5).integers(0, network.config.vocab_size, (2, LENGTH)).tolist()
    plans = [cache.reserve_rows(cache.new_sequence(), range(-1, LENGTH - 1), LENGTH) for _ in tokens]
    logits = network.forward(*assemble_pass(plans, tokens, [range(LENGTH)] * 2, [number] * 2)).logits.astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)


@pytest.mark.parametrize(
    ("target", "kind", "runtime"),
    [
        pytest.param(*case, marks=[] if case in USUAL else pytest.mark.long)
        for case in ((target, kind, runtime) for target in TARGETS for kind in KINDS for runtime in RUNTIMES)
        if case[1] != "experts" or case[0] in MIXTURES
    ],
)
def test_adapter_next_to_the_weights_equals_the_merged_model(target: str, kind: str, runtime: str, opened: Opened) -> None:
    skip_without_kernels(runtime)
    config, weights = opened(target)
    adapter = make_adapter("one", config, seed=11, strength=0.3, **KINDS[kind])
    merged = MergedWeights(weights, config, adapter, weight_type=WeightType.F32)
    expected = log_probs(RUNTIMES[runtime](merged_config(config, adapter), merged))
    network = RUNTIMES[runtime](config, opened(target)[1])
    found, plain = log_probs(network, adapter), log_probs(network)
    assert np.abs(expected - plain).max() > 0.05
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("target", MIXTURES)
def test_expert_adapters_in_one_batch_give_each_sequence_its_own_logits(target: str, runtime: str, opened: Opened) -> None:
    skip_without_kernels(runtime)
    config, weights = opened(target)
    network = RUNTIMES[runtime](config, weights)
    adapters = [make_adapter(name, config, seed=seed, strength=0.3, experts=True) for seed, name in enumerate("ab")]
    numbers = [0, *map(network.load_adapter, adapters), 0]
    tokens = np.random.default_rng(6).integers(0, config.vocab_size, (1, LENGTH)).tolist() * len(numbers)

    def logits(chosen: list[int]) -> FloatArray:
        cache = network.new_cache(8)
        plans = [cache.reserve_rows(cache.new_sequence(), range(-1, LENGTH - 1), LENGTH) for _ in chosen]
        found = network.forward(*assemble_pass(plans, tokens[: len(chosen)], [range(LENGTH)] * len(chosen), chosen)).logits
        return found.reshape(len(chosen), LENGTH, -1).copy()

    together = logits(numbers)
    for own, number in zip(together, numbers, strict=True):
        np.testing.assert_allclose(own, logits([number])[0], atol=1e-4 if runtime == "torch" else 0.0, rtol=0)
    assert np.abs(together[1] - together[2]).max() > 0.05 < np.abs(together[0] - together[1]).max()


def test_quantised_weights_are_unchanged_by_a_separate_adapter(opened: Opened) -> None:
    skip_without_kernels()
    config, weights = opened("llama")
    adapter = make_adapter("one", config, seed=11, strength=0.3)
    quantised = quantized_weights(weights, QuantOptions(bits=8), None)
    merged = MergedWeights(quantised, config, adapter, weight_type=WeightType.F32)
    expected = log_probs(native(config, merged))
    found = log_probs(native(config, quantised), adapter)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


def test_adapter_that_replaces_and_updates_a_matrix_is_refused(opened: Opened) -> None:
    config, weights = opened("llama")
    table = np.zeros((config.vocab_size, config.hidden_size), np.float32)
    low = LowRankUpdate(np.zeros((2, config.vocab_size), np.float32), np.zeros((config.hidden_size, 2), np.float32))
    adapter = Adapter("one", b"key", {"embed_tokens": low}, {}, {"embed_tokens": table})
    for make in RUNTIMES.values() if kernels_path() is not None else [by_torch]:
        with pytest.raises(ConfigError, match=r"'one' replaces and updates embed_tokens, which .*merge_adapter"):
            make(config, weights).load_adapter(adapter)


def test_network_without_adapter_support_refuses_an_adapter(opened: Opened) -> None:
    skip_without_kernels()
    config, weights = opened("llama")
    network = NativeNetwork(decoder(config), config, weights, num_threads=1, max_model_len=64)
    with pytest.raises(BackendUnavailableError, match="the adapter 'one' cannot run on this kind of network"):
        network.load_adapter(make_adapter("one", config, seed=1))
