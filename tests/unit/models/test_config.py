"""config.json and generation_config.json, as written by many versions of transformers, become one ModelConfig."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.model_configs import make_config
from paceline.errors import CheckpointError
from paceline.models.config import ModelConfig, WeightType, config_from_values, read_config
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.layers import Activation, ExpertMLP, NormOrder, QKNorm, RouterScoring
from paceline.models.rope import inverse_frequencies, query_scales
from paceline.models.rope_config import RopeConfig, RopeType
from paceline.models.tensor_names import tensor_shapes

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
GRANITE = {**LLAMA, "model_type": "granite", "architectures": ["GraniteForCausalLM"]}
SEED_OSS = {**LLAMA, "model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"]}
ERNIE = {**LLAMA, "model_type": "ernie4_5", "architectures": ["Ernie4_5ForCausalLM"]}
ERNIE_MOE = {**LLAMA, "model_type": "ernie4_5_moe", "architectures": ["Ernie4_5_MoeForCausalLM"]}
APERTUS = {**LLAMA, "model_type": "apertus", "architectures": ["ApertusForCausalLM"], "rope_parameters": {"rope_theta": 1e4}}
GRANITE_SWA = {**LLAMA, "model_type": "granite_swa", "architectures": ["GraniteSWAForCausalLM"]}
LFM3 = {**LLAMA, "model_type": "lfm3", "architectures": ["Lfm3ForCausalLM"]}
STARCODER2 = {**LLAMA, "model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"]}
STABLELM = {**LLAMA, "model_type": "stablelm", "architectures": ["StableLmForCausalLM"]}
PHI = {**LLAMA, "model_type": "phi", "architectures": ["PhiForCausalLM"]}
HUNYUAN = {**LLAMA, "model_type": "hunyuan_v1_dense", "architectures": ["HunYuanDenseV1ForCausalLM"]}
SMOLLM3 = {**LLAMA, "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 5}
MINISTRAL3 = {
    **LLAMA,
    "model_type": "ministral3",
    "architectures": ["Ministral3ForCausalLM"],
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}


def read(directory: Path, values: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_config(directory)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 2}, (("temperature", 0.6), ("top_k", 20), ("top_p", 0.95))),
        ({"do_sample": True, "min_p": 0.1, "repetition_penalty": 1.1}, (("min_p", 0.1), ("repetition_penalty", 1.1))),
        ({"do_sample": False, "temperature": 0.6}, (("temperature", 0.0),)),
        ({"temperature": "warm", "top_p": None, "top_k": True}, ()),
        ({}, ()),
    ],
)
def test_recommended_sampling_is_read_from_generation_config(
    tmp_path: Path, generation: dict[str, Any], expected: tuple[tuple[str, float], ...]
) -> None:
    assert read(tmp_path, LLAMA, generation).sampling_defaults == expected


def test_llama_config_sizes_are_read(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    assert config == make_config(
        family="llama",
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        norm_eps=1e-5,
        max_positions=512,
        rope=RopeConfig(),
        weight_type=WeightType.BF16,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_head_dim_may_differ_from_hidden_size_per_head(tmp_path: Path) -> None:
    assert read(tmp_path, {**LLAMA, "head_dim": 32}).attention.head_size == 32
    assert read(tmp_path, {**LLAMA, "head_dim": None}).attention.head_size == 16
    assert read(tmp_path, QWEN3).attention.head_size == 128


def test_num_key_value_heads_defaults_to_num_attention_heads(tmp_path: Path) -> None:
    without = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert read(tmp_path, without).attention.num_kv_heads == 4
    assert read(tmp_path, {**QWEN2, "num_key_value_heads": None}).attention.num_kv_heads == 4


@pytest.mark.parametrize(
    ("values", "switches"),
    [
        (LLAMA, (False, False, False, False)),
        ({**LLAMA, "attention_bias": True}, (True, True, False, False)),
        ({**LLAMA, "mlp_bias": True}, (False, False, True, False)),
        ({**MISTRAL, "attention_bias": True}, (False, False, False, False)),
        (QWEN2, (True, False, False, False)),
        (QWEN3, (False, False, False, True)),
        ({**QWEN3, "attention_bias": True}, (True, True, False, True)),
        (SEED_OSS, (True, False, False, False)),
        ({**SEED_OSS, "attention_bias": False, "attention_out_bias": True}, (False, True, False, False)),
    ],
)
def test_model_family_determines_biases_and_qk_norms(tmp_path: Path, values: dict[str, Any], switches: tuple[bool, ...]) -> None:
    layer = read(tmp_path, values).layers[0]
    attention = layer.mixer
    assert (attention.bias, attention.output_bias, layer.mlp.bias, attention.qk_norm is QKNorm.HEAD) == switches


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
@pytest.mark.parametrize(
    ("name", "weight_type"),
    [("float32", WeightType.F32), ("float16", WeightType.F16), ("bfloat16", WeightType.BF16), ("torch.bfloat16", WeightType.BF16)],
)
def test_torch_dtype_and_dtype_both_set_the_weight_type(tmp_path: Path, key: str, name: str, weight_type: WeightType) -> None:
    without = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    assert read(tmp_path, {**without, key: name}).weight_type is weight_type


def test_eos_token_ids_are_the_union_of_config_and_generation_config(tmp_path: Path) -> None:
    assert read(tmp_path, {**LLAMA, "eos_token_id": [7, 5]}, {"eos_token_id": [9, 7]}).eos_token_ids == (9, 7, 5)
    assert read(tmp_path, {**LLAMA, "eos_token_id": 3}, {"eos_token_id": 4}).eos_token_ids == (4, 3)
    assert read(tmp_path, {**LLAMA, "eos_token_id": None}, {}).eos_token_ids == ()
    assert read(tmp_path, QWEN2, {}).eos_token_ids == ()


OLD_LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
NEW_LLAMA3 = {"rope_parameters": {**OLD_LLAMA3["rope_scaling"], "rope_theta": 500000.0}}


@pytest.mark.parametrize("spelling", [OLD_LLAMA3, NEW_LLAMA3])
def test_rope_scaling_and_rope_parameters_spellings_are_equivalent(tmp_path: Path, spelling: dict[str, Any]) -> None:
    rope = read(tmp_path, {**LLAMA, **spelling}).attention.rope
    assert rope == RopeConfig(500000.0, RopeType.LLAMA3, 32.0, 8192, 1.0, 4.0)


def test_rope_scaling_type_is_an_alias_of_rope_type(tmp_path: Path) -> None:
    rope = read(tmp_path, {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}).attention.rope
    assert (rope.type, rope.factor, rope.theta) == (RopeType.LINEAR, 2.0, 10000.0)


def test_contradicting_rope_settings_are_refused(tmp_path: Path) -> None:
    newer, older = {"rope_type": "default", "rope_theta": 5e5}, {"type": "yarn", "factor": 4.0}
    with pytest.raises(CheckpointError, match=r"rope_parameters.*rope_scaling.*differ: keep rope_parameters"):
        read(tmp_path, {**LLAMA, "rope_parameters": newer, "rope_scaling": older})
    both = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read(tmp_path, {**LLAMA, **both, "rope_theta": 5e5}).attention.rope.theta == 5e5
    with pytest.raises(CheckpointError, match="rope_theta included"):
        read(tmp_path, {**LLAMA, **both})


def test_yarn_factor_defaults_to_the_ratio_of_context_lengths(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128}
    assert read(tmp_path, {**LLAMA, "rope_scaling": scaling}).attention.rope.factor == 4.0


@pytest.mark.parametrize("name", ["su", "mrope", 3])
def test_unknown_rope_types_are_refused(tmp_path: Path, name: object) -> None:
    with pytest.raises(CheckpointError, match=f"{name}.*default, linear, llama3, yarn, dynamic, longrope"):
        read(tmp_path, {**LLAMA, "rope_scaling": {"rope_type": name, "factor": 2.0}})


def test_mistral_sliding_window_applies_to_every_layer(tmp_path: Path) -> None:
    config = read(tmp_path, {**MISTRAL, "sliding_window": 128})
    assert (config.max_positions, config.sliding_window) == (512, 128)
    assert {layer.mixer.window for layer in config.layers} == {128}
    unlimited = read(tmp_path, {**MISTRAL, "sliding_window": None})
    assert (unlimited.max_positions, unlimited.sliding_window) == (512, None)
    longer = read(tmp_path, {**MISTRAL, "sliding_window": 4096})
    assert (longer.max_positions, longer.sliding_window) == (512, None)


@pytest.mark.parametrize("values", [QWEN2, QWEN3])
def test_qwen_sliding_window_counts_only_if_a_layer_uses_it(tmp_path: Path, values: dict[str, Any]) -> None:
    unused = {**values, "sliding_window": 128, "max_window_layers": 2}
    assert read(tmp_path, {**unused, "use_sliding_window": False}).max_positions == 512
    assert read(tmp_path, {**unused, "use_sliding_window": True}).sliding_window == 128
    assert read(tmp_path, {**unused, "use_sliding_window": True, "max_window_layers": 3}).sliding_window is None
    assert read(tmp_path, {**unused, "use_sliding_window": True, "layer_types": ["full_attention"] * 3}).sliding_window is None


def test_granite_multipliers_default_to_one(tmp_path: Path) -> None:
    config = read(tmp_path, GRANITE)
    assert (config.embedding_scale, config.logit_scale, config.attention.scale, config.layers[0].residual_scale) == (1.0,) * 4


def test_ministral3_scales_queries_with_position_but_not_keys(tmp_path: Path) -> None:
    config = read(tmp_path, MINISTRAL3)
    rope, key_rope = config.attention.rope, config.attention.key_rope
    assert (rope.attention_temperature_scale, rope.attention_temperature_len) == (0.1, 32)
    assert config.rope_variants == ((rope, 128), (key_rope, 128))
    positions = np.array([0, 31, 32, 63, 64])
    assert np.allclose(query_scales(rope, positions), 1 + 0.1 * np.log([1, 1, 2, 2, 3]), rtol=1e-7, atol=0)
    assert np.array_equal(query_scales(key_rope, positions), np.ones(5, np.float32))
    text = {name: value for name, value in MINISTRAL3.items() if name != "architectures"}
    outer = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "vision_config": {"hidden_size": 1}}
    assert read(tmp_path, {**outer, "text_config": text}) == config


@pytest.mark.parametrize(
    ("values", "has_rope_embedding", "windows"),
    [
        ({}, [1, 1, 1, 0, 1], [0, 0, 0, 0, 0]),
        ({"no_rope_layer_interval": 2}, [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]),
        ({"no_rope_layers": [0, 1, 1, 0, 1, 1]}, [0, 1, 1, 0, 1], [0, 0, 0, 0, 0]),
        ({"sliding_window": 64}, [1, 1, 1, 0, 1], [0, 0, 0, 0, 0]),
        ({"sliding_window": 64, "use_sliding_window": True}, [1, 1, 1, 0, 1], [0, 0, 0, 64, 0]),
        ({"use_sliding_window": True}, [1, 1, 1, 0, 1], [0, 0, 0, 0, 0]),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, [1, 1, 1, 0, 1], [0, 0, 0, 0, 64]),
    ],
)
def test_smollm3_layers_without_rope_are_read_from_the_config(
    tmp_path: Path, values: dict[str, Any], has_rope_embedding: list[int], windows: list[int]
) -> None:
    config = read(tmp_path, {**SMOLLM3, **values})
    assert [layer.mixer.has_rope_embedding for layer in config.layers] == [mark == 1 for mark in has_rope_embedding]
    assert [layer.mixer.window or 0 for layer in config.layers] == windows
    assert config.attention.rope.theta == 2e6
    assert len({id(layer) for layer in config.layers}) == len(set(config.layers))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "gpt2.*llama.*mistral.*qwen2.*qwen3.*gemma2.*gemma3"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": None, "architectures": None}, "None"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "aqlm.*supported are gptq, awq"),
        ({"torch_dtype": "float64"}, "float64"),
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"hidden_size": True}, "hidden_size = True"),
        ({"vocab_size": None}, "no 'vocab_size'"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads = 3"),
        ({"num_attention_heads": 6}, "not a multiple of num_attention_heads"),
        ({"head_dim": 15}, "head_dim = 15"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = 'small'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one set for all layers"),
        ({"tie_word_embeddings": "yes"}, "expected true or false"),
        ({"eos_token_id": "</s>"}, "expected a token id"),
    ],
)
def test_unsupported_config_is_refused_with_its_reason(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        read(tmp_path, {**LLAMA, **changes})


def test_model_type_may_be_missing_if_the_architecture_is_known(tmp_path: Path) -> None:
    assert read(tmp_path, {**LLAMA, "model_type": None}).family == "llama"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100000])
def test_damaged_config_json_is_a_checkpoint_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)


def test_directory_without_config_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_config(tmp_path)


FACTORS = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [2.0, 3.0, 4.0], "partial_rotary_factor": 0.375}
PHI3 = {**LLAMA, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 128}
OLMO3 = {**LLAMA, "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}
GEMMA2 = {**LLAMA, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "max_position_embeddings": 8192}
GEMMA3 = {**GEMMA2, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7}


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi3_rope_factors_depend_on_the_context_length(tmp_path: Path, name: str) -> None:
    config = read(tmp_path, {**PHI3, "rope_scaling": {"type": name, **FACTORS}})
    assert config.attention.rope == RopeConfig(
        10000.0,
        RopeType.LONGROPE,
        factor=4.0,
        original_max_positions=128,
        rotated_fraction=0.375,
        short_factors=(1.0, 1.1, 1.2),
        long_factors=(2.0, 3.0, 4.0),
    )
    for max_model_len, positions, context_len in ((None, 128, 128), (64, 128, 128), (128, 128, 128), (129, 512, 129), (512, 512, 512)):
        chosen = config.for_context(max_model_len)
        assert (chosen.max_positions, chosen.attention.rope.scaled_context_len) == (positions, context_len), max_model_len
        assert chosen.for_context(max_model_len) == chosen
    assert read(tmp_path, LLAMA).for_context(100).max_positions == 512


def test_dynamic_rope_extends_the_context_by_its_factor(tmp_path: Path) -> None:
    config = read(tmp_path, {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert (config.attention.rope.original_max_positions, config.max_positions) == (512, 2048)
    assert config.for_context(None).max_positions == 512
    assert config.for_context(600).max_positions == 2048


def test_gemma2_config_defaults_equal_its_transformers_class(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA2)
    attention, first = config.attention, config.layers[0]
    assert (attention.head_size, attention.scale, attention.qk_norm) == (256, 0.0625, QKNorm.NONE)
    assert (attention.soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert (first.norm_order, config.has_norm_offset, config.tied_embeddings) == (NormOrder.SANDWICH, True, True)
    assert (first.mlp.activation, config.embedding_scale) == (Activation.GELU_TANH, 8.0)
    assert [layer.mixer.window for layer in config.layers] == [4096, None, 4096]
    assert (config.sliding_window, config.max_positions) == (4096, 8192)
    assert (len(config.rope_variants), config.bos_token_id, config.eos_token_ids) == (1, 2, (1,))
    without_caps = read(tmp_path, {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": None})
    assert (without_caps.attention.soft_cap, without_caps.logit_soft_cap, without_caps.max_positions) == (None, None, 8192)


OLD_LOCAL = {"rope_theta": 500000.0, "rope_local_base_freq": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
NEW_LOCAL = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }
}


@pytest.mark.parametrize("spelling", [OLD_LOCAL, NEW_LOCAL])
def test_gemma3_sliding_layers_use_another_rope_theta(tmp_path: Path, spelling: dict[str, Any]) -> None:
    config = read(tmp_path, {**GEMMA3, **spelling})
    ropes = [layer.mixer.rope for layer in config.layers]
    assert [layer for layer, rope in enumerate(ropes) if rope == RopeConfig(5000.0)] == [0, 1, 2, 3, 4, 6]
    assert (ropes[5].theta, ropes[5].type, ropes[5].factor) == (500000.0, RopeType.LINEAR, 8.0)
    assert (config.attention.soft_cap, config.logit_soft_cap, config.attention.qk_norm) == (None, None, QKNorm.HEAD)
    assert len({id(layer) for layer in config.layers}) == 2, "layers that are alike share one object"


def test_gemma3_rope_thetas_have_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3)
    assert [rope.theta for rope, _ in config.rope_variants] == [10000.0, 1e6]
    assert read(tmp_path, {**GEMMA3, "layer_types": ["full_attention"] * 7}).sliding_window is None


def test_text_config_of_a_multimodal_config_is_read_with_outer_fields(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106]}
    config = read(tmp_path, {**outer, "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1}, "text_config": text})
    assert (config.family, config.hidden_size, config.vocab_size) == ("gemma3_text", 2560, 262208)
    attention = config.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_size, config.max_positions) == (8, 4, 256, 131072)
    assert (config.eos_token_ids, config.weight_type) == ((1, 106), WeightType.BF16)


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4", "qwen3_5", "llava", "mistral3"])
def test_multimodal_config_without_text_config_is_refused(tmp_path: Path, model_type: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json of a {model_type} model has no text_config"):
        read(tmp_path, {"model_type": model_type, "vision_config": {"hidden_size": 1}})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({**PHI3, "rope_scaling": {"type": "longrope", **FACTORS, "long_factor": [1.0]}}, "long_factor holds 1 values, expected 3"),
        ({**PHI3, "rope_scaling": {"type": "longrope", **FACTORS, "short_factor": [1.0, 0.0, 1.0]}}, "expected 3 numbers above 0"),
        ({**PHI3, "rope_scaling": {"type": "longrope", **FACTORS, "short_factor": None}}, "short_factor holds None"),
        ({**PHI3, "partial_rotary_factor": 0.45}, "partial_rotary_factor = 0.45 rotates 7 of 16"),
        ({**PHI3, "partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        ({**PHI3, "original_max_position_embeddings": 1, "rope_scaling": {"type": "longrope", **FACTORS}}, "needs at least 2"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA3, "layer_types": ["full_attention"]}, "layer_types"),
        ({**SMOLLM3, "no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers = .*, expected 0 or 1 for 5 layers"),
        ({**SMOLLM3, "no_rope_layers": [1, 1, 1, 0, 2]}, "no_rope_layers"),
        ({**MINISTRAL3, "rope_parameters": None}, "no 'rope_parameters', which a model of family ministral3 needs"),
        ({**MINISTRAL3, "rope_parameters": {"rope_theta": 1e6, "llama_4_scaling_beta": 0.1}}, "no 'original_max_position_embeddings'"),
        ({**MINISTRAL3, "rope_parameters": {**MINISTRAL3["rope_parameters"], "llama_4_scaling_beta": 3e38}}, "are not finite"),
        ({**GRANITE, "residual_multiplier": 0}, "residual_multiplier = 0.0, expected a number above 0"),
        ({**GRANITE, "logits_scaling": "8"}, "logits_scaling = '8'"),
        ({**GEMMA2, "hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        ({**GEMMA2, "attn_logit_softcapping": -1.0}, "attn_logit_softcapping = -1.0"),
        ({**GEMMA2, "rope_parameters": NEW_LOCAL["rope_parameters"]}, "one set for all layers"),
        ({**OLMO3, "rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}}, "one set, which transformers ignores"),
        ({**ERNIE, "compression_ratio": 2.0}, "compression_ratio = 2.0 is not supported for ernie4_5, only 1.0 is"),
        ({**ERNIE_MOE, "use_bias": True}, "use_bias = true is not supported for ernie4_5_moe, only false is"),
        ({**ERNIE_MOE, "moe_k": 65}, "moe_k = 65, but there are only 64 experts"),
        ({**APERTUS, "rope_parameters": None}, "no 'rope_parameters', which a model of family apertus needs"),
        ({**APERTUS, "hidden_act": "silu"}, "hidden_act = 'silu' is not supported, only 'xielu' is"),
        ({**GRANITE_SWA, "layer_rope_theta": [1e4, 0]}, "layer_rope_theta = .*, expected a number of 0 or more for each of 3 layers"),
        ({**GRANITE_SWA, "layer_rope_theta": [1e4, 0, -1]}, "layer_rope_theta"),
        ({**LFM3, "rope_parameters": None}, "no 'rope_parameters', which a model of family lfm3 needs"),
        ({**LFM3, "layer_types": ["conv", "full_attention", "linear_attention"]}, "'linear_attention', which is not supported for lfm3"),
        ({**STARCODER2, "hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'gelu_pytorch_tanh', 'gelu_new' are"),
        ({**STARCODER2, "norm_epsilon": 2.0}, "norm_epsilon = 2.0"),
        ({**STABLELM, "qk_layernorm": True}, "qk_layernorm = true is not supported for stablelm, only false is"),
        ({**PHI, "qk_layernorm": True}, "qk_layernorm = true is not supported for phi, only false is"),
        ({**MISTRAL, "llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling = .* is not supported for mistral, only null is"),
        ({**MISTRAL, "rope_parameters": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta = 0.1 is not supported for mistral, only 0"),
        ({**STABLELM, "final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported for stablelm, only null is"),
        ({**PHI, "residual_multiplier": 0.5}, "residual_multiplier = 0.5 is not supported for phi, only 1 is"),
        ({**HUNYUAN, "use_cla": True}, "use_cla = true is not supported for hunyuan_v1_dense, only false is"),
        ({**HUNYUAN, "head_dim": 2, "rope_scaling": {"type": "dynamic", "alpha": 50.0}}, "more than 2 rotated values per head"),
        ({**HUNYUAN, "rope_scaling": {"type": "dynamic", "alpha": "50"}}, "alpha = '50'"),
    ],
)
def test_invalid_values_of_a_family_config_are_refused(tmp_path: Path, values: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        read(tmp_path, values)


def test_config_values_from_gguf_metadata_need_no_file(tmp_path: Path) -> None:
    values = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    config = config_from_values(values, tmp_path / "model.gguf", weight_type=WeightType.F16, generation={"eos_token_id": 7})
    assert (config.weight_type, config.eos_token_ids) == (WeightType.F16, (7, 2))
    with pytest.raises(CheckpointError, match=r"model\.gguf: weights of type None"):
        config_from_values(values, tmp_path / "model.gguf")


DEEP = json.loads("[" * 400 + "]" * 400)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": ["llama3"], "factor": 2.0}},
        {"rope_scaling": {"rope_type": {"a": 1}, "factor": 2.0}},
        {"rope_scaling": {"type": DEEP, "factor": 2.0}},
        {"rope_scaling": DEEP},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 1e308}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 1e-300}},
        {"rope_scaling": {"rope_type": "linear", "factor": 10**400}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-320}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 1e-300, "attention_factor": 1e300}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 1e-300, "original_max_position_embeddings": 1}},
        {"rope_theta": 1e308},
        {"rope_theta": 10**400},
        {"rms_norm_eps": 10**400},
        {"vocab_size": 10**400},
        {"num_hidden_layers": 2**31 - 1},
        {"num_attention_heads": 1, "head_dim": 2**31 - 2},
        {"partial_rotary_factor": 1e308, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"]},
        {"num_hidden_layers": 2**31 - 1, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]},
        {"eos_token_id": 10**400},
        {"eos_token_id": DEEP},
        {"hidden_act": DEEP},
        {"architectures": [DEEP], "model_type": DEEP},
        {"torch_dtype": DEEP},
        {"quantization_config": DEEP},
        {"quantization_config": {"quant_method": DEEP}},
        {"tie_word_embeddings": DEEP},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_fuzzed_config_numbers_and_types_are_checkpoint_errors(tmp_path: Path, changes: dict[str, Any]) -> None:
    start = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, {**LLAMA, **changes})
    assert len(str(caught.value)) < 4100
    assert time.perf_counter() - start < 2.0


def test_layers_are_grouped_by_kv_cache_layout() -> None:
    plain = make_config(num_layers=2).layers[0]
    wide = replace(plain, mixer=replace(plain.mixer, num_kv_heads=1, head_size=32))
    sliding = replace(plain, mixer=replace(plain.mixer, window=16))
    reader = replace(plain, mixer=replace(plain.mixer, window=16, kv_source_layer=2))
    config = replace(make_config(), layers=(plain, wide, sliding, plain, reader))
    assert [(group.window, group.layers) for group in config.kv_groups()] == [(None, (0, 3)), (None, (1,)), (16, (2,))]
    assert [group.layers for group in config.kv_groups(by_window=False)] == [(0, 2, 3), (1,)]
    assert [group.shape(8, 32) for group in config.kv_groups()] == [(4, 8, 2, 32, 16), (2, 8, 1, 32, 32), (2, 8, 2, 32, 16)]
    assert config.kv_bytes_per_token(KVCacheDtype.F32) == 4 * 2 * 32 * 4
    assert [config.kv_source(layer) for layer in range(5)] == [0, 1, 2, 3, 2]
    assert [config.block_table_index(layer) for layer in range(4)] == [0, 0, 1, 0]


FULL_OF_E2B, FULL_OF_31B = {4, 9, 14, 19, 24, 29, 34}, set(range(5, 60, 6))


@pytest.mark.parametrize(
    ("values", "owners", "row_values", "last"),
    [
        (  # E2B: every fifth layer is global, 20 share keys and values
            {"num_hidden_layers": 35, "hidden_size": 1536, "intermediate_size": 6144, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
             "use_double_wide_mlp": True,
             "layer_types": ["full_attention" if layer in FULL_OF_E2B else "sliding_attention" for layer in range(35)]},
            15, 2 * (12 * 256 + 3 * 512), {13, 14},
        ),
        (  # 31B: keys are values in global layers, which have fewer of them
            {"num_hidden_layers": 60, "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16,
             "num_global_key_value_heads": 4, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 1024},
            60, 2 * (50 * 16 * 256 + 10 * 4 * 512), {58, 59},
        ),
    ],
)  # fmt: skip
def test_gemma4_shared_kv_layers_count_no_cache_memory(values: dict[str, Any], owners: int, row_values: int, last: set[int]) -> None:
    given = {"model_type": "gemma4_text", "vocab_size": 262144, "dtype": "bfloat16", "rms_norm_eps": 1e-6, **values}
    config = config_from_values(given, Path("config.json"))
    assert sum(len(group.layers) for group in config.kv_groups()) == owners
    assert config.kv_bytes_per_token(KVCacheDtype.BF16) == 2 * row_values
    read = {config.kv_source(layer) for layer in range(config.num_layers - 6, config.num_layers)}
    assert last <= read
    assert {layer.mixer.head_size for layer in config.layers} == {256, 512}
    if owners < 60:
        assert {config.kv_source(layer) for layer in range(15, 35)} == {13, 14}
        assert {layer.mlp.intermediate_size for layer in config.layers[15:]} == {12288}
        assert tensor_shapes(config)["layer_embedding.weight"] == (262144, 35 * 256)
    else:
        assert {group.layers for group in config.kv_groups() if group.window is None} == {tuple(sorted(FULL_OF_31B))}
        assert "layers.5.v_proj.weight" not in tensor_shapes(config)
    frequencies, _ = inverse_frequencies(config.layers[-1].mixer.rope, 512)
    assert np.count_nonzero(frequencies) == 64


def test_published_config_of_deepseek_v2_lite_caches_its_latent(tmp_path: Path) -> None:
    values = {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400, "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "norm_topk_prob": False, "scoring_func": "softmax", "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "max_position_embeddings": 163840, "rope_theta": 10000, "torch_dtype": "bfloat16",
        "rope_scaling": {
            "type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1,
        },
    }  # fmt: skip
    config = config_from_values(values, tmp_path / "config.json")
    assert config.kv_bytes_per_token(KVCacheDtype.BF16) == 27 * (512 + 64) * 2
    assert config.attention.scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert [type(layer.mlp).__name__ for layer in config.layers[:3]] == ["DenseMLP", "ExpertMLP", "ExpertMLP"]
    experts = config.layers[1].mlp
    assert isinstance(experts, ExpertMLP)
    assert (experts.routing.num_expert_groups, experts.routing.scoring) == (1, RouterScoring.SOFTMAX)
    assert experts.shared_expert.intermediate_size == 2816
    refused = {"qk_nope_head_dim": 2000, "num_attention_heads": 4096, "norm_topk_prob": True, "model_type": "deepseek_v32"}
    for name, value in refused.items():
        with pytest.raises(CheckpointError, match=f"{name}.*{str(value).lower()}"):
            config_from_values({**values, "num_key_value_heads": None, name: value}, tmp_path / "config.json")
