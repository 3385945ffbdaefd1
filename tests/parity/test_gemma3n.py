"""Gemma 3n computes the logits transformers computes: AltUp, Laurel, sparse activations, per-layer inputs, shared keys and values."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoint_files import read_tensors, read_values, write_tensors, write_values
from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.gemma3n_checkpoints import GEMMA3N, NUM_ROWS
from harness.gemma4_checkpoints import FULL, SLIDING
from harness.gguf_checkpoints import write_gguf, write_rounded
from harness.model_changes import (
    Change,
    change_layers,
    change_mixers,
    change_model,
    change_rope,
    change_window,
    map_layers,
    map_mixers,
    map_mlps,
)
from harness.parity import (
    References,
    check_a_prompt,
    check_change_matters,
    difference,
    open_backend,
    prompt_logits,
    torch_logits,
    transformers_output,
)
from paceline.errors import CheckpointError
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.config import WeightType, read_config
from paceline.models.layers import QKNorm
from paceline.runtimes.base import assemble_pass
from paceline.runtimes.decoder import COLLECTED
from paceline.runtimes.torch.ops import TorchOps

torch = pytest.importorskip("torch")

BOUND = 1e-4
BACKENDS = pytest.mark.parametrize("backend", ["torch", "native"])
DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 11,
    "layer_types": None,
    "rope_parameters": None,
    "activation_sparsity_pattern": None,
    "intermediate_size": 512,  # a twentieth of 96 values would be so few that rounding decides
    "query_key_scale": 0.1,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
STREAMS = {"altup_num_inputs": 3, "altup_active_idx": 2, "altup_correct_scale": False, "attention_bias": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("gemma3n_text", GEMMA3N),
    "other streams": ("gemma3n_text", {**GEMMA3N, **STREAMS}),
    "default": ("gemma3n_text", {**GEMMA3N, **DEFAULTS}),
}


@pytest.mark.spread(0.4)
@BACKENDS
@pytest.mark.parametrize("case", CASES)
def test_gemma3n_prompt_logits_equal_transformers_whole_and_in_chunks(references: References, case: str, backend: str) -> None:
    reference = references(case)
    check_a_prompt(reference, backend, bound=max(BOUND, reference.allowed(backend)))


@BACKENDS
def test_collected_gemma3n_states_are_the_active_stream_of_transformers(references: References, backend: str) -> None:
    """transformers returns all streams; `transformers_output` takes the first one, which is the active one here."""
    reference = references("all")
    runtime = open_backend(reference.directory, backend, collect_layers=(0, 2, 5))
    cache = runtime.new_cache(32)
    plan = cache.reserve_rows(cache.new_sequence(), range(-1, len(reference.token_ids) - 1))
    output = runtime.forward(*assemble_pass([plan], [reference.token_ids], [[0]]))
    for place, layer in enumerate((0, 2, 5)):
        expected = reference.hidden_states[layer][0]
        assert difference(output.results[f"{COLLECTED}.{place}"], expected) <= 1e-5 * np.abs(expected).max()


LEFT_OUT: dict[str, Change] = {
    "no top-k": map_mlps(lambda mlp: {"sparsity_std_factor": None}),
    "other top-k": map_mlps(lambda mlp: {"sparsity_std_factor": mlp.sparsity_std_factor and mlp.sparsity_std_factor * 0.8}),
    "laurel": change_layers(laurel_rank=0),
    "layer inputs": change_layers(per_layer_input=None),
    "other active stream": map_layers(lambda own: replace(own, altup=replace(own.altup, active_index=1))),
    "output scale": map_layers(lambda own: replace(own, altup=replace(own.altup, has_output_scale=False))),
    "window": change_window(17),
    "scale": change_mixers(scale=0.25),
    "query and key norms": change_mixers(qk_norm=QKNorm.NONE),
    "value norm": change_mixers(has_value_norm=False),
    "local rope": change_rope(theta=1e3),
    "other owner": map_mixers(lambda own: {"kv_source_layer": own.kv_source_layer and own.kv_source_layer - 2}),
    "soft cap": change_model(logit_soft_cap=None),
    "embedding scale": change_model(embedding_scale=1.0),
}


@pytest.mark.parametrize("change", LEFT_OUT.values(), ids=LEFT_OUT)
def test_gemma3n_logits_change_if_a_part_is_left_out(references: References, change: Change) -> None:
    check_change_matters(references("all"), change)


@pytest.mark.parametrize("part", ["altup_projections", "altup_unembed", "prediction_coefs", "correction_coefs", "modality_router",
                                  "router_norm", "correct_output_scale", "laurel.linear_left", "post_laurel_norm"])  # fmt: skip
def test_gemma3n_logits_change_with_every_tensor_of_altup_and_laurel(references: References, tmp_path: Path, part: str) -> None:
    """Each is reversed along its last dimension, which changes neither its sum nor its size."""
    reference = references("all")
    tensors = read_tensors(reference.directory)
    changed = {name: array[..., ::-1] if part in name else array for name, array in tensors.items()}
    assert any(changed[name] is not array for name, array in tensors.items())
    (tmp_path / "config.json").write_bytes((reference.directory / "config.json").read_bytes())
    write_tensors(tmp_path, changed)
    assert np.abs(prompt_logits(open_backend(tmp_path, "torch"), reference.token_ids) - reference.logits).max() > 0.05


def test_gaussian_top_k_with_the_deviation_of_a_sample_gives_other_logits(references: References, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp divides by n - 1, transformers by n."""
    reference = references("all")

    def of_sample(ops: TorchOps, x: Any, factor: float) -> Any:
        return torch.relu(x - x.mean(-1, keepdim=True) - factor * x.std(-1, keepdim=True))

    monkeypatch.setattr(TorchOps, "gaussian_top_k", of_sample)
    assert np.abs(torch_logits(read_config(reference.directory), reference) - reference.logits).max() > 20 * BOUND


@BACKENDS
def test_gemma3n_tokens_after_the_per_layer_table_use_its_first_row(references: References, backend: str) -> None:
    reference = references("all")
    assert max(reference.token_ids) >= NUM_ROWS  # so the parity above has such tokens, and this shows what they read
    ids = [NUM_ROWS, VOCAB_SIZE - 1] * 5
    expected, _ = transformers_output(reference.directory, ids)
    assert difference(prompt_logits(open_backend(reference.directory, backend), ids), expected) <= BOUND


@BACKENDS
def test_gemma3n_bfloat16_error_is_near_that_of_transformers(tmp_path: Path, backend: str, seed: int) -> None:
    directory = write_checkpoint(tmp_path, "gemma3n_text", dtype="bfloat16", seed=seed, **GEMMA3N)
    token_ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, 60).tolist()
    exact, narrow = (transformers_output(directory, token_ids, dtype)[0] for dtype in ("float32", "bfloat16"))
    found = prompt_logits(open_backend(directory, backend, weight_type=WeightType.BF16), token_ids)
    assert np.abs(found - exact).mean() <= 1.2 * np.abs(narrow - exact).mean() <= 0.3


@BACKENDS
def test_gemma3n_text_model_stored_with_encoders_has_equal_logits(references: References, tmp_path: Path, backend: str) -> None:
    """As published: encoders, one rotary base for each kind of layer, and keys and values of layers that share those of another."""
    plain = references("all")
    tensors = {name.replace("model.", "model.language_model.", 1): array for name, array in read_tensors(plain.directory).items()}
    encoders = ("vision_tower.timm_model.blocks.0", "embed_vision.embedding_projection", "audio_tower.conformer.0", "embed_audio.embedding")
    for part in encoders:
        tensors[f"model.{part}.weight"] = np.ones((2, 2), np.float32)
    tensors["model.language_model.layers.5.self_attn.k_proj.weight"] = np.ones((2, 2), np.float32)
    write_tensors(tmp_path, tensors)
    text = read_values(plain.directory)
    ropes = text.pop("rope_parameters")
    del text["architectures"]
    text |= {"rope_theta": ropes[FULL]["rope_theta"], "rope_local_base_freq": ropes[SLIDING]["rope_theta"], "rope_scaling": None}
    values = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": text, "dtype": "float32"}
    values |= {"vision_config": {"model_type": "gemma3n_vision"}, "audio_config": {"model_type": "gemma3n_audio"}, "eos_token_id": [0, 5]}
    write_values(tmp_path, values)
    config = read_config(tmp_path)
    assert config.layers == read_config(plain.directory).layers
    assert open_weights(tmp_path, config).has_encoders
    found, expected = (prompt_logits(open_backend(directory, backend), plain.token_ids) for directory in (tmp_path, plain.directory))
    assert np.array_equal(found, expected)


def test_gguf_of_gemma3n_pads_the_per_layer_table_with_zeros(references: References, tmp_path: Path) -> None:
    """As llama.cpp's converter does: tokens that have a row keep their logits, the others have an input of zeros."""
    reference = references("all")
    path = write_gguf(reference.directory, tmp_path / "model.gguf")
    assert read_model_config(path) == replace(read_config(reference.directory), per_layer_vocab_size=VOCAB_SIZE)
    ids = [token_id for token_id in reference.token_ids if token_id < NUM_ROWS]
    found, expected = (prompt_logits(open_backend(where, "torch"), ids) for where in (path, reference.directory))
    assert np.array_equal(found, expected)


def test_quantised_stacks_of_stream_projections_have_their_dequantised_values(references: References, tmp_path: Path) -> None:
    reference = references("all")
    path = write_gguf(reference.directory, tmp_path / "model.gguf", lambda name: "Q8_0" if name.startswith("altup") else "F32")
    widened = write_rounded(reference.directory, tmp_path / "widened", "Q8_0", lambda name, _: "altup_" in name)
    ids = [token_id for token_id in reference.token_ids if token_id < NUM_ROWS]
    found, expected, plain = (prompt_logits(open_backend(where, "torch"), ids) for where in (path, widened, reference.directory))
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, plain)
    assert difference(prompt_logits(open_backend(path, "native"), ids), expected) <= BOUND


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"altup_num_inputs": 1}, "altup_num_inputs = 1, expected an integer from 2"),
        ({"altup_active_idx": 4}, "altup_active_idx = 4, expected an integer from 0 to 3"),
        ({"altup_correct_scale": 2}, "altup_correct_scale = 2, expected true or false"),
        ({"laurel_rank": 0}, "laurel_rank = 0, expected an integer from 1"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input = 0, expected an integer from 1"),
        ({"activation_sparsity_pattern": [0.9] * 5}, "activation_sparsity_pattern = .*, expected a number from 0 to below 1 for each of 6"),
        ({"activation_sparsity_pattern": [1.0] * 6}, "activation_sparsity_pattern = .*, expected a number from 0 to below 1"),
        ({"intermediate_size": [96] * 5}, "intermediate_size = .*, expected a width above 0 for each of 6 layers"),
        ({"intermediate_size": [96.5] * 6}, "intermediate_size = .*, expected a width above 0"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers = 5: no full_attention layer before them"),
        ({"layer_types": [SLIDING]}, "layer_types = .*, expected sliding_attention or full_attention for each of 6 layers"),
        ({"intermediate_size": [96] * 6}, None),
    ],
)
def test_unsupported_gemma3n_config_is_refused_by_the_name_of_its_field(
    references: References, tmp_path: Path, changes: dict[str, Any], message: str | None
) -> None:
    write_values(tmp_path, {**read_values(references("all").directory), **changes})
    if message is None:
        assert read_config(tmp_path).layers[2].mlp.intermediate_size == 96
        return
    with pytest.raises(CheckpointError, match=message) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"gemma3n.altup.num_inputs": 1}, "gemma3n.altup.num_inputs = 1, expected an integer from 2"),
        ({"gemma3n.altup.active_idx": 9}, "gemma3n.altup.active_idx = 9, expected an integer from 0 to 3"),
        ({"gemma3n.altup.num_inputs": 3}, r"altup_proj.weight.* has shape \[3, 64, 64\], but the metadata requires \[2, 64, 64\]"),
        ({"gemma3n.activation_sparsity_scale": [1.0, 2.0]}, "activation_sparsity_scale = .*, expected a number for each of 6 layers"),
        ({"gemma3n.attention.shared_kv_layers": 7}, "attention.shared_kv_layers = 7, expected fewer than"),
        ({"gemma3n.feed_forward_length": [96, 96]}, "gemma3n.feed_forward_length = .*, expected a width above 0 for each of 6 layers"),
        ({"gemma3n.attention.sliding_window": 0}, "attention.sliding_window"),
    ],
)
def test_unsupported_gemma3n_metadata_is_refused_by_its_key(
    references: References, tmp_path: Path, metadata: dict[str, Any], text: str
) -> None:
    path = write_gguf(references("all").directory, tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=text):
        open_backend(path, "torch")
