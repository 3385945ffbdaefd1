"""Gemma 4 computes the logits transformers computes: layers of two sizes, shared keys and values, inputs of layers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoint_files import read_tensors, read_values, write_tensors, write_values
from harness.checkpoints import VOCAB_SIZE
from harness.gemma4_checkpoints import FULL, GEMMA4, SLIDING, UNIFIED, write_gemma4
from harness.model_changes import Change, change_layers, change_mixers, change_model, change_window, map_mixers
from harness.parity import References, check_a_prompt, check_change_matters, difference, open_backend, prompt_logits, transformers_output
from paceline.errors import CheckpointError
from paceline.models.config import WeightType, read_config
from paceline.models.layers import AttentionConfig
from paceline.runtimes.base import assemble_pass

pytest.importorskip("torch")

BOUND = 1e-4
BACKENDS = pytest.mark.parametrize("backend", ["torch", "native"])
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("gemma4_text", GEMMA4),
    "projected": (
        "gemma4_text", {**GEMMA4, "attention_k_eq_v": False, "hidden_size_per_layer_input": 0, "final_logit_softcapping": None},
    ),
    "unified": ("gemma4_unified_text", UNIFIED),
    "default": (
        "gemma4_text", {**GEMMA4, "layer_types": None, "rope_parameters": None, "num_kv_shared_layers": 0, "attention_bias": True},
    ),
}  # fmt: skip


@pytest.mark.spread(0.4)
@BACKENDS
@pytest.mark.parametrize("case", CASES)
def test_gemma4_prompt_logits_equal_transformers_whole_and_in_chunks(references: References, case: str, backend: str) -> None:
    reference = references(case)
    bound = max(BOUND, reference.rounding)
    check_a_prompt(reference, backend, bound=bound)
    runtime = open_backend(reference.directory, backend)
    cache = runtime.new_cache(32)
    plan = cache.reserve_rows(cache.new_sequence(), range(-1, len(reference.token_ids) - 1))
    output = runtime.forward(*assemble_pass([plan], [reference.token_ids], [[0]]))
    assert difference(output.hidden_states, reference.hidden_states[-1]) <= 20 * bound


def rotated_alike(mixer: AttentionConfig) -> dict[str, Any]:
    """The part that turns is contiguous, as in other families."""
    return {} if mixer.window else {"rope": replace(mixer.rope, rotated_fraction=1.0)}


def earlier_owner(mixer: AttentionConfig) -> dict[str, Any]:
    """The owner of the same kind in front of the right one."""
    return {"kv_source_layer": None if mixer.kv_source_layer is None else mixer.kv_source_layer - 2}


LEFT_OUT: dict[str, tuple[str, Change]] = {
    "window": ("all", change_window(17)),
    "scale": ("all", change_mixers(scale=0.25)),
    "value norm": ("all", change_mixers(has_value_norm=False)),
    "rope": ("all", map_mixers(rotated_alike)),
    "layer inputs": ("all", change_layers(per_layer_input=None)),
    "layer scalar": ("all", change_layers(has_output_scale=False)),
    "other owner": ("all", map_mixers(earlier_owner)),
    "soft cap": ("all", change_model(logit_soft_cap=None)),
    "embedding scale": ("all", change_model(embedding_scale=1.0)),
    "unified's rope": ("unified", map_mixers(rotated_alike)),
}


@pytest.mark.parametrize(("case", "change"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_gemma4_logits_change_if_a_part_is_left_out(references: References, case: str, change: Change) -> None:
    check_change_matters(references(case), change)


@BACKENDS
def test_gemma4_bfloat16_logits_are_as_near_as_those_of_transformers(tmp_path: Path, backend: str, seed: int) -> None:
    directory = write_gemma4(tmp_path, dtype="bfloat16", seed=seed)
    token_ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, 60).tolist()
    exact, narrow = (transformers_output(directory, token_ids, dtype)[0] for dtype in ("float32", "bfloat16"))
    found = prompt_logits(open_backend(directory, backend, weight_type=WeightType.BF16), token_ids)
    assert np.abs(found - exact).mean() <= 1.2 * np.abs(narrow - exact).mean() <= 0.2


@BACKENDS
@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_gemma4_text_model_stored_with_encoders_has_equal_logits(references: References, tmp_path: Path, kind: str, backend: str) -> None:
    """Published files name the sizes of all global layers at once; transformers writes them for each layer."""
    plain = references("all" if kind == "gemma4" else "unified")
    tensors = {name.replace("model.", "model.language_model.", 1): one for name, one in read_tensors(plain.directory).items()}
    for part in ("vision_tower.patches", "embed_vision.embedding_projection", "audio_tower.layers.0", "embed_audio.a", "vision_embedder.b"):
        tensors[f"model.{part}.weight"] = np.ones((2, 2), np.float32)
    if kind == "gemma4":  # published checkpoints may hold what their last layers do not use
        tensors["model.language_model.layers.7.self_attn.k_proj.weight"] = np.ones((2, 2), np.float32)
    write_tensors(tmp_path, tensors)
    text = read_values(plain.directory)
    del text["per_layer_config"], text["architectures"]
    text |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    values = {"model_type": kind, "architectures": ["AnyForConditionalGeneration"], "text_config": text, "dtype": "float32"}
    write_values(tmp_path, {**values, "vision_config": {}, "audio_config": None, "eos_token_id": [0, 5]})
    generation = {"suppress_tokens": [7, 9], "eos_token_id": [0, 6]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    config = read_config(tmp_path)
    assert config.eos_token_ids == (0, 6, 5)
    assert config.suppressed_token_ids == (7, 9)
    assert config.layers == read_config(plain.directory).layers
    found, expected = (prompt_logits(open_backend(directory, backend), plain.token_ids) for directory in (tmp_path, plain.directory))
    assert np.array_equal(found, expected)


def test_gemma4_layer_numbers_may_be_padded_with_zeros(references: References, tmp_path: Path) -> None:
    """transformers saves "05" in models of more than ten layers."""
    directory = references("all").directory
    values = read_values(directory)
    write_values(tmp_path, {**values, "per_layer_config": {f"0{layer}": own for layer, own in values["per_layer_config"].items()}})
    assert read_config(tmp_path).layers == read_config(directory).layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "has no 'num_experts'"),
        ({"sliding_window": 0}, "sliding_window = 0, expected"),
        ({"sliding_window": None}, "sliding_window"),
        ({"layer_types": [SLIDING, "chunked_attention"] * 4}, "layer_types = .*chunked_attention"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers = 7: no full_attention layer before them"),
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers = 8, expected fewer than num_hidden_layers = 8"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers = -1"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"vocab_size_per_layer_input": 50}, "vocab_size_per_layer_input = 50 is below vocab_size = 97"),
        ({"rope_parameters": {FULL: GEMMA4["rope_parameters"][FULL]}}, "rope_parameters = .*sliding_attention"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config gives full_attention layers different sizes"),
        ({"per_layer_config": {"0": {"intermediate_size": 32}}}, "per_layer_config of layer 0"),
        ({"per_layer_config": [1]}, "per_layer_config"),
        ({"per_layer_config": None, "num_global_key_value_heads": 3}, "4 query heads over 3 key heads"),
    ],
)
def test_unsupported_gemma4_config_is_refused_by_the_name_of_its_field(
    references: References, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_values(tmp_path, {**read_values(references("all").directory), **changes})
    with pytest.raises(CheckpointError, match=message) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)
