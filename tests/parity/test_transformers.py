"""Each family on each runtime computes the logits transformers computes, on tiny random checkpoints.

Bounds on max |Δlogit| (the logits have a standard deviation of about 1.2) are in `KINDS`. A pass of one row uses other kernels
than transformers' whole prompt, hence its wider bound; torch with exact numerics knows no other passes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.exact_targets import skip_without_kernels
from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.kv_cache.row_plan import TreeLayout, path_to
from paceline.models.config import WeightType, read_config
from paceline.models.weights import Weights
from paceline.runtimes.base import FloatArray, ForwardOutput, Network, assemble
from paceline.runtimes.decoder import decoder
from paceline.runtimes.load import RuntimeOptions, load_runtime
from paceline.tokenizer.tokenizer import Tokenizer

torch = pytest.importorskip("torch")

PROMPT_LEN = 300
ONE_ROW_FACTOR = 3
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}}),
    "mistral": ("mistral", {"head_dim": 32}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": (
        "qwen2",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biased-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}),
}

Open = Callable[[Path, WeightType, Sequence[int]], Network]


def open_torch(layout: TreeLayout) -> Open:
    def open_it(directory: Path, weight_type: WeightType, collect_layers: Sequence[int]) -> Network:
        from paceline.runtimes.torch.network import TorchNetwork

        config = read_config(directory)
        weights = Weights.open(directory, config)
        runtime = TorchNetwork(decoder(config, collect_layers), config, weights, weight_type=weight_type)
        runtime.capabilities = replace(runtime.capabilities, tree_layout=layout)
        return runtime

    return open_it


def open_native(directory: Path, weight_type: WeightType, collect_layers: Sequence[int]) -> Network:
    skip_without_kernels()
    options = RuntimeOptions(dtype=weight_type, num_threads=2, backend="native", collect_layers=collect_layers)
    return load_runtime(directory, options).runtime


@dataclass(frozen=True)
class Kind:
    """How a runtime is opened, and its bounds on max |Δlogit| for float32 and bfloat16."""

    open: Open
    bound: float
    bf16_bound: float


KINDS = {
    "torch": Kind(open_torch(TreeLayout.MASK), 1e-5, 1e-3),
    "torch-paths": Kind(open_torch(TreeLayout.PATHS), 1e-5, 1e-3),
    "native": Kind(open_native, 3e-5, 0.3),
}
BY_KIND = pytest.mark.parametrize("kind", ["torch", "native"])
BY_KIND_AND_LAYOUT = pytest.mark.parametrize("kind", KINDS)
BY_CASE = pytest.mark.parametrize("case", CASES)


def open_runtime(
    directory: Path, kind: str, *, weight_type: WeightType = WeightType.F32, collect_layers: Sequence[int] = ()
) -> tuple[Network, KVCache]:
    """A runtime with a cache of 64 blocks on a checkpoint."""
    runtime = KINDS[kind].open(directory, weight_type, collect_layers)
    return runtime, runtime.new_cache(64)


def append(runtime: Network, cache: KVCache, sequence: CachedSequence, token_ids: Sequence[int]) -> ForwardOutput:
    """One pass over `token_ids`, which become committed."""
    plan = cache.reserve(sequence, range(-1, len(token_ids) - 1))
    output = runtime.forward(*assemble([plan], [list(token_ids)], [list(range(len(token_ids)))]))
    cache.keep_path(sequence, len(token_ids) - 1)
    return output


@dataclass(frozen=True)
class Reference:
    """What transformers computes for one prompt in float32."""

    directory: Path
    token_ids: list[int]
    logits: FloatArray
    hidden_states: tuple[FloatArray, ...]  # every boundary; the last one after the final norm


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    known: dict[str, Reference] = {}

    def reference(case: str) -> Reference:
        if case not in known:
            family, overrides = CASES[case]
            directory = write_checkpoint(tmp_path_factory.mktemp(case), family, **overrides)
            token_ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, PROMPT_LEN).tolist()
            known[case] = Reference(directory, token_ids, *transformers_output(directory, token_ids))
        return known[case]

    return reference


def transformers_output(directory: Path, token_ids: list[int], dtype: str = "float32") -> tuple[FloatArray, tuple[FloatArray, ...]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    with torch.inference_mode():
        output = model(torch.tensor([token_ids]), output_hidden_states=True)
    return output.logits[0].float().numpy(), tuple(states[0].float().numpy() for states in output.hidden_states)


def difference(found: FloatArray, expected: FloatArray) -> float:
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    return float(np.abs(found - expected).max())


@pytest.mark.spread(0.4)
@BY_KIND
@BY_CASE
def test_a_prompt_gives_the_logits_of_transformers_in_one_pass_in_chunks_and_one_by_one(
    references: Callable[[str], Reference], case: str, kind: str
) -> None:
    reference = references(case)
    runtime, cache = open_runtime(reference.directory, kind)
    for chunk_lens in ([PROMPT_LEN], [1, 31, 33, 64, 100, 71], [40, *[1] * 8]):
        sequence, begin = cache.new_sequence(), 0
        for chunk_len in chunk_lens:
            output = append(runtime, cache, sequence, reference.token_ids[begin : begin + chunk_len])
            bound = KINDS[kind].bound * (ONE_ROW_FACTOR if chunk_len == 1 else 1)
            assert difference(output.logits, reference.logits[begin : begin + chunk_len]) <= bound, (chunk_lens, begin)
            begin += chunk_len
        cache.release(sequence)
    cache.check()


@BY_KIND
def test_prompts_of_any_length_agree(references: Callable[[str], Reference], kind: str) -> None:
    reference = references("llama")
    runtime, cache = open_runtime(reference.directory, kind)
    for prompt_len in (1, 2, 31, 32, 33, 65):
        output = append(runtime, cache, cache.new_sequence(), reference.token_ids[:prompt_len])
        assert difference(output.logits, reference.logits[:prompt_len]) <= KINDS[kind].bound, prompt_len


@BY_KIND
def test_sequences_in_one_pass_do_not_see_one_another(references: Callable[[str], Reference], kind: str) -> None:
    reference = references("qwen3")
    runtime, cache = open_runtime(reference.directory, kind)
    parts = [(0, 50), (0, 1), (0, 33), (0, 97)]
    plans = [cache.reserve(cache.new_sequence(), range(-1, end - begin - 1)) for begin, end in parts]
    tokens = [reference.token_ids[begin:end] for begin, end in parts]
    wanted = [[end - 1] for _, end in parts]
    output = runtime.forward(*assemble(plans, tokens, wanted))
    expected = np.stack([reference.logits[end - 1] for _, end in parts])
    assert difference(output.logits, expected) <= KINDS[kind].bound


@BY_KIND_AND_LAYOUT
@pytest.mark.parametrize("committed_len", [7, 31])
def test_each_node_of_a_tree_gets_the_logits_of_its_own_path(references: Callable[[str], Reference], kind: str, committed_len: int) -> None:
    reference = references("llama-llama3")
    runtime, cache = open_runtime(reference.directory, kind)
    sequence = cache.new_sequence()
    append(runtime, cache, sequence, reference.token_ids[:committed_len])
    parents, node_tokens = [-1, 0, 0, 1, 1, 2, 3], [5, 17, 23, 42, 8, 96, 61]
    plan = cache.reserve(sequence, parents)
    output = runtime.forward(*assemble([plan], [node_tokens], [list(range(len(parents)))]))
    for leaf in (4, 5, 6):
        path = path_to(parents, leaf)
        text = reference.token_ids[:committed_len] + [node_tokens[node] for node in path]
        expected = transformers_output(reference.directory, text)[0][committed_len:]
        assert difference(output.logits[path], expected) <= KINDS[kind].bound
    cache.keep_path(sequence, 6)
    kept = append(runtime, cache, sequence, [3]).logits
    text = reference.token_ids[:committed_len] + [node_tokens[node] for node in (0, 1, 3, 6)] + [3]
    assert difference(kept, transformers_output(reference.directory, text)[0][-1:]) <= KINDS[kind].bound


@BY_KIND
def test_hidden_states_and_boundaries_are_those_of_transformers(references: Callable[[str], Reference], kind: str) -> None:
    reference = references("qwen2-tied")
    runtime, cache = open_runtime(reference.directory, kind, collect_layers=(0, 2, 1))
    output = append(runtime, cache, cache.new_sequence(), reference.token_ids)
    bound = 10 * KINDS[kind].bound  # the residual stream is several times as large as the logits
    assert difference(output.hidden_states, reference.hidden_states[-1]) <= bound
    assert output.collected_hidden_states is not None
    for found, layer in zip(output.collected_hidden_states, (0, 2, 1), strict=True):
        assert difference(found, reference.hidden_states[layer]) <= bound


@BY_KIND
@pytest.mark.parametrize("case", ["llama", "qwen2-tied"])
def test_embeddings_agree(references: Callable[[str], Reference], case: str, kind: str) -> None:
    reference = references(case)
    runtime, _ = open_runtime(reference.directory, kind)
    assert difference(runtime.embed(np.array(reference.token_ids, np.int32)), reference.hidden_states[0]) == 0.0


@BY_KIND
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_stays_within_its_bound(tmp_path: Path, kind: str, family: str, seed: int) -> None:
    directory = write_checkpoint(tmp_path, family, dtype="bfloat16", seed=seed)
    token_ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, 60).tolist()
    assert read_config(directory).weight_type is WeightType.BF16
    runtime, cache = open_runtime(directory, kind, weight_type=WeightType.BF16)
    output = append(runtime, cache, cache.new_sequence(), token_ids)
    expected, _ = transformers_output(directory, token_ids, "bfloat16")
    assert difference(output.logits, expected) <= KINDS[kind].bf16_bound


@BY_KIND
def test_sharded_checkpoints_are_the_same_model(tmp_path: Path, kind: str, seed: int) -> None:
    whole = write_checkpoint(tmp_path / "whole", "llama", seed=seed)
    sharded = write_checkpoint(tmp_path / "sharded", "llama", seed=seed, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    outputs = []
    for directory in (whole, sharded):
        runtime, cache = open_runtime(directory, kind)
        outputs.append(append(runtime, cache, cache.new_sequence(), list(range(40))).logits.copy())
    assert np.array_equal(*outputs)


@pytest.fixture(scope="session")
def greedy_story(shared_dir: Path) -> tuple[Path, int, list[int]]:
    """A trained checkpoint, the length of a prompt, and prompt and greedy text by transformers."""
    from transformers import AutoModelForCausalLM

    directory = shared_dir / "data" / "models" / "TinyStories-656K"
    if not directory.is_dir():
        pytest.skip("TinyStories-656K is not in ../shared")
    prompt = Tokenizer.open(directory).encode("Once upon a time, there was a little girl named Lily. She")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        text = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=60)[0].tolist()
    return directory, len(prompt), text


@BY_KIND
def test_greedy_text_of_a_trained_model_equals_that_of_transformers(greedy_story: tuple[Path, int, list[int]], kind: str) -> None:
    directory, prompt_len, expected = greedy_story
    runtime, cache = open_runtime(directory, kind)
    sequence, token_ids = cache.new_sequence(), expected[:prompt_len]
    fresh = list(token_ids)
    while len(token_ids) < len(expected):
        fresh = [int(append(runtime, cache, sequence, fresh).logits[-1].argmax())]
        token_ids += fresh
    assert token_ids == expected
