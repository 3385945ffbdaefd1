"""The configs and GGUF files of Muse Glimmer: what is read, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoints import MUSE_GLIMMER, write_checkpoint
from harness.gguf_checkpoints import write_gguf
from paceline.errors import CheckpointError
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.config import ModelConfig, config_from_values
from paceline.models.layers import AttentionGate, NormOrder, QKNorm
from paceline.models.weights import as_float32

TYPES = (["sliding_attention"] * 3 + ["full_attention"]) * 13
TEXT: dict[str, Any] = {
    "model_type": "muse_glimmer_text", "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 202048, "max_position_embeddings": 131072,
    "hidden_activation": "silu", "rms_norm_eps": 1e-5, "post_norm_eps": 1e-8, "qk_scale_factor": 3.87, "final_logit_softcapping": 20.0,
    "output_multiplier": 0.19611613513818404, "sliding_window": 2048, "tie_word_embeddings": False, "layer_types": TYPES,
    "layer_rope_theta": [500000.0 if kind == "sliding_attention" else 0.0 for kind in TYPES], "attention_bias": False,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
}  # fmt: skip
"""The text model of Muse-Glimmer-30B."""


def read(**changes: Any) -> ModelConfig:
    text = {name: value for name, value in {**TEXT, **changes}.items() if value != "absent"}
    architectures = ["MuseGlimmerForConditionalGeneration"]
    whole = {"model_type": "muse_glimmer", "architectures": architectures, "dtype": "bfloat16", "text_config": text, "vision_config": {}}
    return config_from_values(whole, Path("config.json"))


def test_published_config_of_muse_glimmer_is_read() -> None:
    config = read()
    sliding, full = (config.layers[layer].attention for layer in (0, 3))
    assert (sliding.window, sliding.has_rope_embedding, sliding.rope.theta) == (2048, True, 500000.0)
    assert (full.window, full.has_rope_embedding) == (None, False)
    assert (sliding.qk_norm, sliding.gate, sliding.scale) == (QKNorm.UNWEIGHTED_HEAD, AttentionGate.VALUE, pytest.approx(3.87 / 128**0.5))
    assert (config.layers[0].norm_order, config.layers[0].output_norm_eps) == (NormOrder.SANDWICH, 1e-8)
    assert (config.logit_scale, config.logit_soft_cap) == (0.19611613513818404, 20.0)
    assert config.has_embedding_norm
    assert config.has_norm_offset
    assert (config.bos_token_id, config.eos_token_ids) == (200000, (200001,))
    assert [layer.attention.has_rope_embedding for layer in config.layers] == [kind == "sliding_attention" for kind in TYPES]


@pytest.mark.parametrize("num_layers", [1, 4, 5, 7])
def test_muse_glimmer_layers_without_lists_are_those_of_transformers(num_layers: int) -> None:
    transformers = pytest.importorskip("transformers")
    expected = transformers.MuseGlimmerConfig(text_config={"num_hidden_layers": num_layers}).text_config
    config = read(num_hidden_layers=num_layers, layer_types="absent", layer_rope_theta="absent")
    assert [layer.attention.window is not None for layer in config.layers] == [kind == "sliding_attention" for kind in expected.layer_types]
    assert [layer.attention.has_rope_embedding for layer in config.layers] == [bool(theta) for theta in expected.layer_rope_theta]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_rope_theta": [1e4] * 52}, r"layer_rope_theta = .*expected 0 or the rope_theta 500000 for each of 52 layers"),
        ({"layer_rope_theta": [0] * 51}, r"layer_rope_theta = .*for each of 52 layers"),
        ({"attention_bias": True}, r"attention_bias = true is not supported for muse_glimmer_text, only false is"),
        ({"qk_scale_factor": 0}, r"qk_scale_factor = 0.*, expected a number above 0"),
        ({"output_multiplier": -1}, r"output_multiplier = -1.*, expected a number above 0"),
        ({"post_norm_eps": 2}, r"post_norm_eps = 2.*, expected a number from 0 to 1"),
        ({"layer_types": ["chunked_attention"] * 52}, r"layer_types = .*expected sliding_attention or full_attention"),
        ({"hidden_activation": "gelu"}, r"hidden_activation = 'gelu' is not supported"),
    ],
)
def test_unsupported_muse_glimmer_settings_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        read(**changes)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("gguf")
    return write_checkpoint(tmp_path_factory.mktemp("muse"), "muse_glimmer_text", **{**MUSE_GLIMMER, "post_norm_eps": 1e-8})


def test_final_norm_of_muse_glimmer_is_read_as_stored(directory: Path) -> None:
    from safetensors.numpy import load_file

    stored, config = load_file(directory / "model.safetensors"), read_model_config(directory)
    weights, prefix = open_weights(directory, config), "model.language_model."
    assert np.array_equal(as_float32(weights["final_norm.weight"]), stored[f"{prefix}norm.weight"])
    for name, part in (("attention_norm", "input_layernorm"), ("mlp_output_norm", "post_feedforward_layernorm")):
        assert np.array_equal(as_float32(weights[f"layers.2.{name}.weight"]), stored[f"{prefix}layers.2.{part}.weight"] + np.float32(1))


def with_norm(path: Path, name: str, values: object) -> None:
    import gguf

    tensor = next(tensor for tensor in gguf.GGUFReader(path, "r+").tensors if tensor.name == name)
    tensor.data[:] = values
    tensor.data.flush()


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        (
            "blk.1.attn_q_norm.weight",
            np.arange(1, 17),
            r"attn_q_norm\.weight holds numbers from 1\.0 to 16\.0, expected one number above 0",
        ),
        ("blk.1.attn_q_norm.weight", -1, r"attn_q_norm\.weight holds numbers from -1\.0 to -1\.0"),
        ("blk.1.attn_q_norm.weight", 2, r"attn_q_norm and attn_k_norm are \[2\.0, 3\.0\] and \[1\.0\], expected one factor"),
        ("blk.4.attn_k_norm.weight", 2, r"attn_q_norm and attn_k_norm are \[3\.0\] and \[1\.0, 2\.0\], expected one factor"),
    ],
)
def test_gguf_norms_of_queries_and_keys_that_are_no_factor_are_refused(
    directory: Path, tmp_path: Path, name: str, values: object, text: str
) -> None:
    path = write_gguf(directory, tmp_path / "model.gguf")
    with_norm(path, name, values)
    with pytest.raises(CheckpointError, match=text):
        read_model_config(path)


def test_gguf_layers_may_be_given_as_an_interval(directory: Path, tmp_path: Path) -> None:
    path = write_gguf(directory, tmp_path / "model.gguf", metadata={"muse-glimmer.attention.sliding_window_pattern": 4})
    layers = read_model_config(path).layers
    assert [layer.attention.has_rope_embedding for layer in layers] == [True, True, True, False, True]
    assert [layer.attention.window for layer in layers] == [16, 16, 16, None, 16]


def test_gguf_rotary_base_of_sliding_layers_takes_precedence(directory: Path, tmp_path: Path) -> None:
    path = write_gguf(directory, tmp_path / "model.gguf", metadata={"muse-glimmer.rope.freq_base_swa": 500.0})
    assert read_model_config(path).layers[1].attention.rope.theta == 500.0
