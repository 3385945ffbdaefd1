"""X-LoRA adapters equal their definition on a whole text, however the text is split into passes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.parity import difference
from harness.xlora_files import Definition, write_xlora
from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.models.adapters.xlora import read_any_adapter
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.runtimes.base import FloatArray, Network, assemble_pass
from paceline.runtimes.decoder import decoder
from paceline.runtimes.native.library import kernels_path
from paceline.runtimes.native.network import NativeNetwork
from paceline.runtimes.torch.network import TorchNetwork

ONE_EACH = (
    ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"),
    ("self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
JOINED = (("self_attn.qkv_proj", "mlp.down_proj"), ("self_attn.qkv_proj", "mlp.gate_up_proj"))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layerwise": {"layerwise_scalings": True},
    "temperature": {"softmax_temperature": 0.3, "global_scaling_weight": 1.7},
    "linear": {"enable_softmax": False},
    "top-k": {"top_k_lora": 2, "layerwise_scalings": True},
    "top-k-linear": {"top_k_lora": 1, "enable_softmax": False},
    "top-k-softmax": {"top_k_lora": 2, "enable_softmax": False, "enable_softmax_topk": True},
    "two-softmaxes": {"enable_softmax_topk": True},
    "pass-value": {"scaling_pass_value": 0.4},
    "pass-value-softmax": {"scaling_pass_value": 0.4, "enable_softmax_topk": True, "top_k_lora": 3, "layerwise_scalings": True},
    "deep": {"xlora_depth": 3, "layerwise_scalings": True},
    "deep-without-dropout": {"xlora_depth": 2, "xlora_dropout_p": 0.0},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {},
    "gemma2": {"query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 16},
    "olmo2": {},
    "exaone4": {},
    "granite": {},
    "seed_oss": {},
    "smollm3": {},
}
LENGTH, BOUND = 70, 1e-4
Made = tuple[Network, Path, Path]
Setup = Callable[..., Made]
RUNTIMES = [pytest.param("native", marks=pytest.mark.skipif(kernels_path() is None, reason="no native kernels for this machine")), "torch"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """A model that runs, its directory, and that of an adapter for it."""
    folder, written = tmp_path_factory.mktemp("xlora"), dict[str, Path]()

    def of(runtime: str, family: str, values: dict[str, Any], number: int, **options: Any) -> Made:
        if family not in written:
            written[family] = write_checkpoint(folder / family, family, **{"num_hidden_layers": 2, **values})
        config = read_model_config(written[family]).for_context(None)
        directory = write_xlora(folder / f"{family}-{number}", config, seed=number, **options)
        weights = open_weights(written[family], config)
        if runtime == "torch":
            return TorchNetwork(decoder(config), config, weights), written[family], directory
        native = NativeNetwork(decoder(config), config, weights, num_threads=2, max_model_len=128, supports_adapters=True)
        return native, written[family], directory

    return of


def load(network: Network, directory: Path, num_blocks: int = 24) -> tuple[KVCache, int]:
    """A cache for scaling passes too, and the number of the adapter."""
    cache = network.new_cache(num_blocks)
    network.enable_xlora(cache)
    adapter = read_any_adapter(directory, name="mix", config=network.config, weights=network.weights)
    return cache, network.load_adapter(adapter)


def append(network: Network, cache: KVCache, sequence: CachedSequence, token_ids: list[int], number: int) -> FloatArray:
    plan = cache.reserve_rows(sequence, range(-1, len(token_ids) - 1))
    logits = network.forward(*assemble_pass([plan], [token_ids], [range(len(token_ids))], [number])).logits.copy()
    cache.keep_path(sequence, len(token_ids) - 1)
    return logits


def check(network: Network, base: Path, directory: Path) -> None:
    """In one pass, in chunks and row by row a text has the logits of the definition; and they are not those of the model."""
    token_ids = np.random.default_rng(0).integers(1, VOCAB_SIZE, LENGTH).tolist()
    expected = Definition(base, directory).logits(token_ids)
    cache, number = load(network, directory)
    for chunk_lens in ([LENGTH], [1, 31, 33, 5], [40, *[1] * 6, 24]):
        sequence, begin, before = cache.new_sequence(), 0, network.num_xlora_passes
        for chunk_len in chunk_lens:
            found = append(network, cache, sequence, token_ids[begin : begin + chunk_len], number)
            assert difference(found, expected[begin : begin + chunk_len]) <= BOUND, (chunk_lens, begin)
            begin += chunk_len
        assert network.num_xlora_passes - before == len(chunk_lens)
    before = network.num_xlora_passes
    assert difference(append(network, cache, cache.new_sequence(), token_ids, 0), expected) > 0.1
    assert network.num_xlora_passes == before  # no request with X-LoRA was in it


@pytest.mark.spread(0.4)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_x_lora_logits_with_every_setting_equal_the_definition(runtime: str, name: str, made: Setup) -> None:
    check(*made(runtime, "llama", {"attention_bias": True}, list(VARIANTS).index(name), **VARIANTS[name]))


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.long] if number > 4 else []) for number, name in enumerate(FAMILIES)]
)
def test_layerwise_x_lora_scalings_follow_the_module_order_of_the_model(family: str, made: Setup) -> None:
    check(*made("torch", family, FAMILIES[family], 20, modules=ONE_EACH, layerwise_scalings=True))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_x_lora_on_fused_projections_equals_the_definition(runtime: str, made: Setup) -> None:
    check(*made(runtime, "phi3", {}, 21, modules=JOINED))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_rows_of_several_x_lora_adapters_in_one_pass_equal_each_alone(runtime: str, made: Setup) -> None:
    """Two X-LoRA adapters with other scaling passes, and the model itself; one scaling pass serves both."""
    network, base, first = made(runtime, "llama", {}, 30)
    _, _, second = made(runtime, "llama", {}, 31, scaling_pass_value=0.3, layerwise_scalings=True)
    cache, number = load(network, first)
    numbers = [number, network.load_adapter(read_any_adapter(second, name="other", config=network.config)), 0, number]
    texts = np.random.default_rng(1).integers(1, VOCAB_SIZE, (4, 20)).tolist()
    plans = [cache.reserve_rows(cache.new_sequence(), range(-1, 19), 20) for _ in texts]
    before = network.num_xlora_passes
    output = network.forward(*assemble_pass(plans, texts, [range(20)] * 4, numbers)).logits.reshape(4, 20, -1)
    assert network.num_xlora_passes == before + 1
    definitions = {0: Definition(base, first), 1: Definition(base, second), 3: Definition(base, first)}
    for place, definition in definitions.items():
        assert difference(output[place], definition.logits(texts[place])) <= BOUND


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_x_lora_tree_rows_equal_their_paths_also_after_keep_path(runtime: str, made: Setup) -> None:
    """The scaling pass sees the tree as the real one does, and its keys and values move with the kept rows."""
    network, base, directory = made(runtime, "llama", {}, 32, scaling_pass_value=0.2, xlora_depth=2)
    definition, random = Definition(base, directory), np.random.default_rng(2)
    cache, number = load(network, directory)
    prompt, sequence = random.integers(1, VOCAB_SIZE, 37).tolist(), cache.new_sequence()
    append(network, cache, sequence, prompt, number)
    parents, tokens = [-1, 0, 0, 2, 1, 3], random.integers(1, VOCAB_SIZE, 6).tolist()
    paths = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4], [0, 2, 3, 5]]
    plan = cache.reserve_rows(sequence, parents)
    logits = network.forward(*assemble_pass([plan], [tokens], [range(6)], [number])).logits.copy()
    for node, path in enumerate(paths):
        expected = definition.logits([*prompt, *(tokens[one] for one in path)])[-1]
        assert difference(logits[node], expected) <= BOUND, node
    cache.keep_path(sequence, 5)
    text = [*prompt, *(tokens[one] for one in paths[5]), 7]
    assert difference(append(network, cache, sequence, [7], number)[0], definition.logits(text)[-1]) <= BOUND
