"""A GGUF file is the same model as the checkpoint directory it was made from: not a bit of the logits differs on the torch runtime."""

from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import dense_checkpoints, expert_checkpoints
from harness.checkpoints import MUSE_GLIMMER, VOCAB_SIZE, write_checkpoint
from harness.exact_targets import skip_without_kernels
from harness.gemma3n_checkpoints import GEMMA3N
from harness.gemma4_checkpoints import GEMMA4
from harness.gguf_checkpoints import dequantize, with_random_blocks, write_gguf, write_rounded
from harness.parity import prompt_logits
from paceline.config import QuantOptions
from paceline.errors import CheckpointError
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.config import WeightType
from paceline.models.gguf.blocks import QUANTIZED_BLOCK_TYPES
from paceline.models.gguf.header import BLOCK_TYPES
from paceline.models.rope_config import RopeType
from paceline.models.storage.quantized_cache import quantized_weights
from paceline.models.weights import GroupedTensor
from paceline.runtimes.base import FloatArray, Numerics
from paceline.runtimes.load import RuntimeOptions, load_network
from paceline.runtimes.native.library import kernels_path

pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

TOKEN_IDS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 40).tolist()
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128}
LONGROPE |= {"short_factor": [1.0 + pair / 8 for pair in range(8)], "long_factor": [1.5 + pair for pair in range(8)]}
GEMMA3 = {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": 64}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: dense_checkpoints.CASES[name] for name in dense_checkpoints.OF_CONVERTERS},
    **{name: expert_checkpoints.CASES[name] for name in expert_checkpoints.OF_CONVERTERS},
    "llama-llama3": ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192}}),
    "phi3": ("phi3", {"rope_parameters": {**LONGROPE, "partial_rotary_factor": 1.0}, "original_max_position_embeddings": 128}),
    "gemma2": ("gemma2", GEMMA3),
    "cohere": ("cohere", {"tie_word_embeddings": True}),
    "cohere2": ("cohere2", {"num_hidden_layers": 5, "sliding_window": 16, "tie_word_embeddings": True}),
    "apertus": ("apertus", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192}}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3-linear": ("gemma3_text", {**GEMMA3, "rope_parameters": GEMMA3_ROPE}),
    "gemma3n": ("gemma3n_text", {**GEMMA3N, "vocab_size_per_layer_input": VOCAB_SIZE}),
    "muse_glimmer": ("muse_glimmer_text", {**MUSE_GLIMMER, "post_norm_eps": 1e-8, "qk_scale_factor": 3.87}),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4-projected": ("gemma4_text", {**GEMMA4, "attention_k_eq_v": False, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
}
BY_CASE = pytest.mark.parametrize("case", CASES)
Make = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(case: str, dtype: str) -> Path:
        family, overrides = CASES[case]
        return write_checkpoint(tmp_path_factory.mktemp(f"{case}-{dtype}"), family, dtype=dtype, **overrides)

    return make


def logits(path: Path, **options: Any) -> FloatArray:
    """Of one prompt, computed in float32."""
    options = {"numerics": Numerics.FAST, "dtype": WeightType.F32, "device": "cpu", "backend": "torch", **options}
    found = prompt_logits(load_network(path, RuntimeOptions(**options)).network, TOKEN_IDS)
    assert np.isfinite(found).all()
    return found


def distance(found: FloatArray, expected: FloatArray) -> float:
    """Root mean square of the difference over the spread of what was expected."""
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


def test_recommended_sampling_is_read_from_gguf_metadata(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "hf", "llama")
    given = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.25}
    found = read_model_config(write_gguf(directory, tmp_path / "model.gguf", metadata=given))
    assert found.sampling_defaults == (("temperature", 0.5), ("top_k", 20), ("repetition_penalty", 1.25))


@BY_CASE
def test_unquantised_gguf_has_the_config_and_tensors_of_its_directory(checkpoint: Make, tmp_path: Path, case: str) -> None:
    directory = checkpoint(case, "float32")
    path = write_gguf(directory, tmp_path / "model.gguf")
    config = read_model_config(path)
    assert config == read_model_config(directory)
    found, expected = open_weights(path, config), open_weights(directory, config)
    assert list(found) == list(expected)
    assert found.nbytes == expected.nbytes
    for name in found:
        assert np.array_equal(found[name].array, expected[name].array), name


@pytest.mark.parametrize(
    ("case", "dtype", "block_type"),
    [
        *((case, "float32", "F32") for case in ("llama-llama3", "phi3", "gemma3n", "gemma4", "glm4_moe", "gpt_oss", "muse_glimmer")),
        ("llama", "float16", "F16"),
        ("llama", "bfloat16", "BF16"),
        ("gemma2", "bfloat16", "BF16"),
    ],
)
def test_unquantised_gguf_has_the_logits_of_its_directory(checkpoint: Make, tmp_path: Path, case: str, dtype: str, block_type: str) -> None:
    directory = checkpoint(case, dtype)
    path = write_gguf(directory, tmp_path / "model.gguf", block_type)
    assert np.array_equal(logits(path), logits(directory))


@pytest.mark.spread(0.4)
@pytest.mark.parametrize("case", ["llama", "qwen2-tied", "phi3"])
@pytest.mark.parametrize("block_type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_gguf_has_the_logits_of_its_dequantised_values(checkpoint: Make, tmp_path: Path, case: str, block_type: str) -> None:
    """The values are what the format's own library makes of the blocks, written as safetensors."""
    directory = checkpoint(case, "float32")
    path = write_gguf(directory, tmp_path / "model.gguf", block_type)
    widened = write_rounded(directory, tmp_path / "widened", block_type, lambda name, array: array.ndim == 2)
    assert np.array_equal(logits(path), logits(widened))
    assert not np.array_equal(logits(path), logits(directory))


@pytest.mark.skipif(kernels_path() is None, reason="no native kernels for this machine")
@pytest.mark.parametrize(
    ("case", "block_type"),
    [
        ("llama", "Q4_0"),
        ("llama", "Q4_1"),
        ("llama", "Q5_1"),
        ("llama", "Q8_0"),
        ("qwen2-tied", "Q4_1"),
        ("gemma2", "Q8_0"),
        ("gemma3", "Q4_0"),
    ],
)
def test_native_gguf_kernels_round_activations_unless_dtype_is_float32(
    checkpoint: Make, tmp_path: Path, case: str, block_type: str
) -> None:
    """Rounding moves logits by a few hundredths of their spread; in float32 only the order of sums differs from torch's."""
    path = write_gguf(checkpoint(case, "float32"), tmp_path / "model.gguf", block_type)
    expected = logits(path)
    exact, rounded = (logits(path, backend="native", dtype=dtype) for dtype in (WeightType.F32, None))
    assert distance(exact, expected) < 1e-5
    assert 1e-3 < distance(rounded, expected) < 0.1


@pytest.mark.skipif(kernels_path() is None, reason="no native kernels for this machine")
@pytest.mark.parametrize("quantization", [None, QuantOptions(bits=4)])
@pytest.mark.parametrize("case", ["llama", "qwen2-tied", "gemma2", "qwen3_moe"])
def test_packed_gguf_weights_are_held_once_and_stay_readable(
    checkpoint: Make, tmp_path: Path, case: str, quantization: QuantOptions | None
) -> None:
    path = write_gguf(checkpoint(case, "float32"), tmp_path / "model.gguf", "Q8_0")
    weights = load_network(path, RuntimeOptions(device="cpu", backend="native", quantization=quantization)).network.weights
    source = getattr(weights, "_weights", weights)  # of what is quantised further
    held = {name for name, tensor in [*weights._tensors.items(), *source._tensors.items()] if isinstance(tensor, GroupedTensor)}
    # whose rows are looked up: in panels, or a quantised one's in groups; a tied one's in the other form
    assert held == ({"embedding.weight"} if quantization is not None and case in ("llama", "qwen3_moe") else set())
    fresh = open_weights(path, read_model_config(path))
    if quantization is not None:
        fresh = quantized_weights(fresh, quantization, None)
    for name in ("layers.0.q_proj.weight", f"layers.1.{'experts.5.' if case == 'qwen3_moe' else ''}down_proj.weight"):
        assert np.array_equal(weights[name].matrix.values(), fresh[name].matrix.values())


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_only_used_rows_of_per_layer_embeddings_are_converted(checkpoint: Make, tmp_path: Path, backend: str) -> None:
    skip_without_kernels(backend)
    directory = checkpoint("gemma4", "float32")
    path = write_gguf(directory, tmp_path / "model.gguf", lambda in_file: "Q8_0" if in_file == "per_layer_token_embd.weight" else "F32")
    widened = write_rounded(directory, tmp_path / "widened", "Q8_0", lambda name, _: name == "model.embed_tokens_per_layer.weight")
    assert np.array_equal(logits(path, backend=backend), logits(widened, backend=backend))
    runtime = load_network(path, RuntimeOptions(dtype=WeightType.F32, device="cpu", backend=backend)).network
    weights = runtime.weights if backend == "native" else runtime._shared.weights._weights
    assert "layer_embedding.weight" not in weights._tensors


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"gemma4.attention.shared_kv_layers": 8}, "shared_kv_layers = 8, expected fewer than 8 layers"),
        ({"gemma4.attention.shared_kv_layers": 7, "gemma4.feed_forward_length": 96}, "attention.shared_kv_layers = 7"),
        ({"gemma4.attention.value_length": 8}, "value_length = 8, expected the size of keys, 32"),
        ({"gemma4.rope.dimension_count": 8}, "dimension_count = 8, expected the whole head, 32"),
        ({"gemma4.rope.scaling.type": "yarn"}, "rope.scaling.type = 'yarn', expected none"),
        ({"gemma4.feed_forward_length": [96] * 7 + [80]}, "feed_forward_length = .*, expected the same for every layer"),
        ({"gemma4.attention.head_count_kv": [2, 1, 2, 2, 2, 1, 2, 1]}, "different sizes"),
        ({"gemma4.attention.head_count_kv": [2, 1]}, "head_count_kv = .*, expected a whole number, or one for each of 8 layers"),
        (
            {"gemma4.attention.sliding_window_pattern": [1, 0]},
            "sliding_window_pattern = .*, expected for each of 8 layers",
        ),
        ({"gemma4.expert_count": 4}, "has no metadata gemma4.expert_used_count"),
    ],
)
def test_unsupported_gemma4_metadata_is_refused_by_its_key(checkpoint: Make, tmp_path: Path, metadata: dict[str, Any], text: str) -> None:
    path = write_gguf(checkpoint("gemma4", "float32"), tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=text):
        read_model_config(path)


def test_gguf_of_mixed_block_types_runs(tmp_path: Path, seed: int) -> None:
    """As Q4_K_M files are: several types in one file, the output matrix in another than the rest."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    directory = write_checkpoint(tmp_path / "directory", "llama", seed=seed, num_hidden_layers=4, **sizes)
    names, path = cycle(sorted(QUANTIZED_BLOCK_TYPES)), tmp_path / "mixed.gguf"
    plain = write_gguf(directory, tmp_path / "plain.gguf")
    stored = with_random_blocks(plain, path, lambda _: next(names), np.random.default_rng(seed))
    weights = open_weights(path, read_model_config(path))
    assert {block_type for block_type, _ in stored.values()} == set(QUANTIZED_BLOCK_TYPES)
    block_type, blocks = stored["blk.1.attn_q.weight"]
    values = dequantize(blocks, block_type)
    ours = values.reshape(8, 16, 2, 256).swapaxes(1, 2).reshape(256, 256)
    assert np.array_equal(weights["layers.1.q_proj.weight"].matrix.values(), ours)
    assert weights.nbytes == sum(weights[name].nbytes for name in weights)
    assert logits(path).shape == (len(TOKEN_IDS), VOCAB_SIZE)
    if kernels_path() is not None:
        assert distance(logits(path, backend="native"), logits(path)) < 3e-5
        assert distance(logits(path, backend="native", dtype=None), logits(path)) < 0.1


def test_split_gguf_file_has_the_logits_of_the_whole_file(checkpoint: Make, tmp_path: Path) -> None:
    directory = checkpoint("qwen3", "float32")
    whole = write_gguf(directory, tmp_path / "whole.gguf")
    write_gguf(directory, tmp_path / "split.gguf", max_tensors=10)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) > 2
    for part in (parts[0], parts[-1]):
        assert np.array_equal(logits(part), logits(whole))


def test_regrouped_gguf_matrices_have_nearly_the_same_logits(checkpoint: Make, tmp_path: Path) -> None:
    directory = checkpoint("llama", "float32")
    path = write_gguf(directory, tmp_path / "model.gguf", "Q8_0")
    config = read_model_config(path)
    matrix = open_weights(path, config, regroup=True)["layers.0.up_proj.weight"].matrix
    assert (matrix.bits, matrix.group_size) == (8, 64)
    assert open_weights(path, config)["layers.0.up_proj.weight"].matrix.group_size == 32
    difference = np.abs(logits(path, regroup=True) - logits(path)).max()
    assert 0 < difference < 0.5


@pytest.mark.parametrize(
    ("case", "metadata", "text"),
    [
        ("granite", {"granite.rope.scaling.finetuned": 0}, "granite.rope.scaling.finetuned = 0, expected true"),
        ("ministral3", {"mistral3.attention.temperature_length": 64}, "temperature_length = 64, expected the original context length, 32"),
        ("glm4", {"glm4.rope.dimension_sections": [2, 1, 1, 0]}, "glm4.rope.dimension_sections = .*, expected none"),
    ],
)
def test_unsupported_rope_type_is_refused(checkpoint: Make, tmp_path: Path, case: str, metadata: dict[str, Any], text: str) -> None:
    path = write_gguf(checkpoint(case, "float32"), tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=text):
        read_model_config(path)


def test_gguf_rope_divisors_of_unknown_origin_are_used_as_stored(checkpoint: Make, tmp_path: Path) -> None:
    rope = {**LLAMA3, "original_max_position_embeddings": 64}
    directory = write_checkpoint(tmp_path / "directory", "llama", rope_parameters=rope)
    path = write_gguf(directory, tmp_path / "model.gguf")
    assert read_model_config(path).attention.rope.type is RopeType.LONGROPE
    assert np.abs(logits(path) - logits(directory)).max() <= 1e-5
    known = write_gguf(checkpoint("llama-llama3", "float32"), tmp_path / "known.gguf")
    assert read_model_config(known).attention.rope.type is RopeType.LLAMA3


def test_gguf_block_type_table_equals_that_of_the_gguf_package() -> None:
    known = {number: (block.name, block.num_items, block.num_bytes) for number, block in BLOCK_TYPES.items()}
    expected = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: expected.get(number) for number in known} == known
