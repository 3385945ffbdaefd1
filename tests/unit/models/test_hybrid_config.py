"""config.json of networks with recurrent layers, as published and as transformers writes it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import CheckpointError
from paceline.models.config import ModelConfig, WeightType, read_config
from paceline.models.layers import (
    Activation,
    AttentionConfig,
    AttentionGate,
    DenseMLP,
    ExpertMLP,
    GatedDeltaConfig,
    GatedNorm,
    Mamba2Config,
    NormOrder,
    QKNorm,
    Recurrent,
    ShortConvConfig,
)

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "dtype": "bfloat16",
}  # fmt: skip
QWEN: dict[str, Any] = {**SIZES, "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
QWEN_MOE: dict[str, Any] = {**QWEN, "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
NEXT: dict[str, Any] = {**QWEN, "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
LFM2: dict[str, Any] = {**SIZES, "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "full_attn_idxs": [2]}
LFM2_MOE: dict[str, Any] = {**LFM2, "model_type": "lfm2_moe", "architectures": ["Lfm2MoeForCausalLM"]}
GRANITE: dict[str, Any] = {
    **SIZES, "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "mamba_n_heads": 8,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    **SIZES, "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M-*EM",
    "num_hidden_layers": 9,
}  # fmt: skip

FALCON: dict[str, Any] = {
    **SIZES, "model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 96, "mamba_n_heads": 6,
}  # fmt: skip
OLMO: dict[str, Any] = {**SIZES, "model_type": "olmo_hybrid", "architectures": ["OlmoHybridForCausalLM"]}


def read(directory: Path, values: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(values))
    return read_config(directory)


def recurrent(config: ModelConfig) -> Recurrent:
    (mixer,) = set(config.recurrent_layers.values())
    return mixer


@pytest.mark.parametrize("values", [QWEN, QWEN_MOE, NEXT], ids=["dense", "moe", "next"])
def test_qwen_hybrid_config_defaults_equal_their_transformers_classes(tmp_path: Path, values: dict[str, Any]) -> None:
    config = read(tmp_path, values)
    assert list(config.attention_layers) == [3]
    assert recurrent(config) == GatedDeltaConfig(num_key_heads=16, num_value_heads=32, key_size=128, value_size=128, kernel_size=4)
    attention = config.attention
    assert (attention.head_size, attention.qk_norm, attention.gate) == (256, QKNorm.HEAD, AttentionGate.VALUE)
    assert attention.rope.rotary_size(256) == 64
    assert config.has_norm_offset
    mlp = config.layers[0].mlp
    assert isinstance(mlp, DenseMLP if values is QWEN else ExpertMLP)
    if isinstance(mlp, ExpertMLP):
        assert (mlp.routing.num_experts, mlp.routing.num_experts_per_token) == ((256, 8) if values is QWEN_MOE else (512, 10))
        assert mlp.routing.has_normalized_weights
        assert mlp.has_shared_expert_gate
        assert mlp.shared_expert == mlp.expert == DenseMLP(intermediate_size=512)


@pytest.mark.parametrize(
    ("changes", "attends"),
    [
        ({"full_attention_interval": 2}, [1, 3]),
        ({"layer_types": ["full_attention", *["linear_attention"] * 3], "full_attention_interval": 2}, [0]),
        ({"full_attention_interval": 1}, [0, 1, 2, 3]),
    ],
)
def test_qwen_hybrid_layers_are_read_from_a_list_or_an_interval(tmp_path: Path, changes: dict[str, Any], attends: list[int]) -> None:
    assert list(read(tmp_path, {**QWEN, **changes}).attention_layers) == attends


def test_text_config_of_a_multimodal_qwen_is_read(tmp_path: Path) -> None:
    text = {
        **QWEN,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10], "mrope_interleaved": True},
    }
    del text["architectures"]
    outer = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": True}
    config = read(tmp_path, {**outer, "text_config": text, "vision_config": {"depth": 2}})
    assert (config.family, config.attention.rope.theta, config.tied_embeddings) == ("qwen3_5_text", 1e7, True)
    assert config.attention.rope.rotary_size(256) == 64


@pytest.mark.parametrize("spelling", [{"full_attn_idxs": [2]}, {"layer_types": ["conv", "conv", "full_attention", "conv"]}])
def test_lfm2_layer_kinds_are_read_from_both_spellings(tmp_path: Path, spelling: dict[str, Any]) -> None:
    config = read(tmp_path, {**LFM2, "full_attn_idxs": None, **spelling, "norm_eps": 1e-3, "tie_embedding": False})
    assert list(config.attention_layers) == [2]
    assert recurrent(config) == ShortConvConfig(channels=64, kernel_size=3)
    assert (config.norm_eps, config.tied_embeddings, config.attention.rope.theta) == (1e-3, False, 1e6)


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({}, 256),
        ({"block_ff_dim": 10240}, 6912),
        ({"block_auto_adjust_ff_dim": False}, 96),
        ({"block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3}, 88),
        ({"block_multiple_of": 8, "block_ffn_dim_multiplier": None}, 64),
    ],
)
def test_lfm2_mlp_width_is_adjusted_as_in_transformers(tmp_path: Path, changes: dict[str, Any], width: int) -> None:
    assert read(tmp_path, {**LFM2, **changes}).layers[0].mlp == DenseMLP(intermediate_size=width)


def test_lfm2_moe_layers_start_after_the_dense_layers(tmp_path: Path) -> None:
    config = read(tmp_path, LFM2_MOE)
    assert [isinstance(layer.mlp, ExpertMLP) for layer in config.layers] == [False, False, True, True]
    routing = config.layers[2].mlp.routing  # type: ignore[union-attr]
    assert (routing.num_experts, routing.num_experts_per_token, routing.has_correction_bias, routing.weight_sum_epsilon) == (
        32,
        4,
        True,
        1e-6,
    )


@pytest.mark.parametrize(
    ("limit", "limits"),
    [
        (None, (0.0, math.inf)),
        ([0.0, {"__float__": "Infinity"}], (0.0, math.inf)),
        ([0.0, math.inf], (0.0, math.inf)),
        ([0.5, 2], (0.5, 2.0)),
    ],
)
def test_granite_time_step_limit_is_read(tmp_path: Path, limit: object, limits: tuple[float, float]) -> None:
    config = read(tmp_path, {**GRANITE, "time_step_limit": limit})
    assert recurrent(config) == Mamba2Config(num_heads=8, head_size=16, num_groups=1, state_size=256, kernel_size=4, dt_limits=limits)
    assert config.weight_type is WeightType.BF16


@pytest.mark.parametrize(("name", "has_rope_embedding"), [(None, False), ("nope", False), ("rope", True)])
def test_granite_position_embedding_type_may_be_nope(tmp_path: Path, name: str | None, has_rope_embedding: bool) -> None:
    config = read(tmp_path, {**GRANITE, "position_embedding_type": name, "attention_multiplier": 0.5})
    assert [(mixer.has_rope_embedding, mixer.scale) for mixer in config.attention_layers.values()] == [(has_rope_embedding, 0.5)]


@pytest.mark.parametrize("key", ["layer_types", "layers_block_type"])
@pytest.mark.parametrize("names", [("mamba", "attention"), ("linear_attention", "full_attention")])
def test_granite_layer_kinds_are_read_from_both_spellings(tmp_path: Path, key: str, names: tuple[str, str]) -> None:
    values = {name: value for name, value in GRANITE.items() if name != "layer_types"}
    config = read(tmp_path, {**values, key: [names[0], names[1], names[1], names[0]]})
    assert [isinstance(layer.mixer, AttentionConfig) for layer in config.layers] == [False, True, True, False]


def test_granite_hybrid_without_experts_has_only_the_shared_mlp(tmp_path: Path) -> None:
    shared = DenseMLP(intermediate_size=1024)
    assert read(tmp_path, {**GRANITE, "num_local_experts": 0}).layers[0].mlp == shared
    mlp = read(tmp_path, GRANITE).layers[0].mlp
    assert isinstance(mlp, ExpertMLP)
    assert (mlp.shared_expert, mlp.expert, mlp.has_shared_expert_gate) == (shared, DenseMLP(intermediate_size=96), False)


@pytest.mark.parametrize(
    "spelling",
    [
        {},
        {"hybrid_override_pattern": None, "layers_block_type": ["mamba", "mlp", "attention", "moe", "mamba"]},
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"], "hybrid_override_pattern": "M"},
    ],
)
def test_nemotron_h_layer_is_either_a_mixer_or_an_mlp(tmp_path: Path, spelling: dict[str, Any]) -> None:
    config = read(tmp_path, {**NEMOTRON, **spelling, "layer_norm_epsilon": 1e-3, "moe_latent_size": 16})
    mixers, mlps = [layer.mixer for layer in config.layers], [layer.mlp for layer in config.layers]
    assert [type(mixer) for mixer in mixers] == [Mamba2Config, type(None), AttentionConfig, type(None), Mamba2Config]
    assert [type(mlp) for mlp in mlps] == [type(None), DenseMLP, type(None), ExpertMLP, type(None)]
    assert mlps[1] == DenseMLP(intermediate_size=96, activation=Activation.RELU, has_gate=False)
    assert (list(config.attention_layers), list(config.recurrent_layers), config.norm_eps) == ([2], [0, 4], 1e-3)
    assert recurrent(config) == Mamba2Config(num_heads=128, head_size=64, num_groups=8, state_size=128, kernel_size=4, norm_groups=8)
    assert not config.attention.has_rope_embedding
    assert isinstance(mlps[3], ExpertMLP)
    assert mlps[3].latent_size == 16


def test_falcon_h1_layers_have_attention_and_a_mixer_without_norm(tmp_path: Path) -> None:
    config = read(tmp_path, FALCON)
    assert list(config.attention_layers) == list(config.recurrent_layers) == [0, 1, 2, 3]
    mixer = Mamba2Config(num_heads=6, head_size=16, num_groups=1, state_size=256, kernel_size=4, norm=GatedNorm.NONE)
    assert recurrent(config) == mixer
    assert recurrent(read(tmp_path, {**FALCON, "mamba_d_ssm": None, "mamba_n_heads": 8})) == replace(mixer, num_heads=8)


@pytest.mark.parametrize(
    ("rope", "has_rope_embedding"),
    [
        ({}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, False),
        ({"rope_theta": None}, False),
        ({"rope_theta": 5e5}, True),
    ],
)
def test_olmo_hybrid_sizes_and_rope_default_to_those_of_transformers(
    tmp_path: Path, rope: dict[str, Any], has_rope_embedding: bool
) -> None:
    config = read(tmp_path, {**OLMO, **rope})
    sizes = {"num_key_heads": 4, "num_value_heads": 4, "key_size": 12, "value_size": 24, "kernel_size": 4}
    assert recurrent(config) == GatedDeltaConfig(**sizes, beta_scale=2.0, has_separate_qkv_projections=True, norm_eps=1e-5)
    assert [layer.norm_order for layer in config.layers] == [*[NormOrder.PRE] * 3, NormOrder.POST]
    assert config.attention.has_rope_embedding is has_rope_embedding


@pytest.mark.parametrize(
    ("values", "changes", "text"),
    [
        (QWEN, {"layer_types": ["linear_attention"] * 3}, "layer_types names 3 layers, but num_hidden_layers = 4"),
        (QWEN, {"layer_types": "all"}, "layer_types names 'all', but num_hidden_layers"),
        (
            QWEN,
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types names 'sliding_attention', .* supported are linear_attention, full",
        ),
        (QWEN, {"layer_types": [None, *["full_attention"] * 3]}, "layer_types names None"),
        (QWEN, {"layer_types": [["full_attention"]] * 4}, "layer_types names"),
        (QWEN, {"layer_types": ["linear_attention"] * 4}, "layer_types has no layer with attention"),
        (QWEN, {"full_attention_interval": 5}, "no layer with attention"),
        (QWEN, {"full_attention_interval": 0}, "full_attention_interval = 0"),
        (QWEN, {"linear_num_value_heads": 24}, "linear_num_value_heads = 24 must be a multiple of linear_num_key_heads = 16"),
        (QWEN, {"linear_key_head_dim": 10**9}, "linear_key_head_dim = 1000000000, expected"),
        (QWEN, {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim = 0"),
        (QWEN, {"linear_conv_kernel_dim": 17}, "linear_conv_kernel_dim = 17"),
        (QWEN, {"attn_output_gate": False}, "attn_output_gate = false"),
        (LFM2, {"full_attn_idxs": [4]}, r"full_attn_idxs = \[4\], expected numbers of layers below 4"),
        (LFM2, {"full_attn_idxs": True}, "full_attn_idxs = True"),
        (LFM2, {"block_ffn_dim_multiplier": 1e30}, "block_ffn_dim_multiplier makes an MLP"),
        (LFM2, {"conv_L_cache": "3"}, "conv_L_cache = '3'"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
        (GRANITE, {"mamba_d_head": 24}, r"mamba_n_heads = 8 times mamba_d_head = 24 must be mamba_expand \* hidden_size = 128"),
        (GRANITE, {"mamba_n_heads": 7}, "mamba_n_heads = 7"),
        (GRANITE, {"mamba_n_groups": 3}, "mamba_n_heads = 8 must be a multiple of mamba_n_groups = 3"),
        (GRANITE, {"time_step_limit": [1.0, 0.5]}, "time_step_limit"),
        (GRANITE, {"time_step_limit": [0.0]}, "time_step_limit"),
        (GRANITE, {"time_step_limit": [math.nan, 1.0]}, "time_step_limit"),
        (GRANITE, {"time_step_limit": [10**400, math.inf]}, "time_step_limit"),
        (GRANITE, {"layer_types": None}, "layer_types has no layer with attention"),
        (GRANITE, {"num_local_experts": -1}, "num_local_experts = -1"),
        (FALCON, {"mamba_d_head": 24}, "mamba_n_heads = 6 times mamba_d_head = 24 must be mamba_d_ssm = 96"),
        (FALCON, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh' is not supported, only 'silu'"),
        (FALCON, {"ssm_multipliers": [1.0, 1.0]}, "ssm_multipliers holds 2 values, expected 5 numbers above 0"),
        (FALCON, {"mlp_multipliers": [1.0, 0]}, "mlp_multipliers holds 2 values, expected 2 numbers above 0"),
        (FALCON, {"attention_bias": True}, "attention_bias = true"),
        (OLMO, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh' is not supported, only 'silu'"),
        (OLMO, {"linear_key_head_dim": "12"}, "linear_key_head_dim = '12'"),
        (NEMOTRON, {"hybrid_override_pattern": "M-M"}, "no layer has attention"),
        (NEMOTRON, {"hybrid_override_pattern": "M|*"}, "names a layer '|', supported are linear_attention, full"),
        (NEMOTRON, {"hybrid_override_pattern": None}, "layers_block_type = None, expected a list"),
        (NEMOTRON, {"layers_block_type": [["moe"]]}, "names a layer"),
        (NEMOTRON, {"hybrid_override_pattern": "*" * 5000}, "layers_block_type = .*, expected a list of 1 to 4096 layers"),
        (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu' is not supported, only 'relu2' is"),
        (NEMOTRON, {"mamba_hidden_act": "gelu"}, "mamba_hidden_act = 'gelu'"),
        (NEMOTRON, {"mlp_bias": True}, "mlp_bias = true"),
        (NEMOTRON, {"n_group": 3}, "n_group = 3"),
        (NEMOTRON, {"layers_block_type": 0}, "layers_block_type = 0, expected a list"),
        (NEMOTRON, {"layers_block_type": []}, r"layers_block_type = \[\], expected a list"),
        (NEMOTRON, {"layer_norm_epsilon": math.nan}, ": layer_norm_epsilon = nan"),
        (LFM2, {"block_ff_dim": -3}, ": block_ff_dim = -3"),
        (LFM2, {"norm_eps": math.nan}, ": norm_eps = nan"),
        (LFM2_MOE, {"num_dense_layers": -1}, "num_dense_layers = -1, expected an integer from 0 to 4"),
        (LFM2_MOE, {"num_dense_layers": 2.5}, r"num_dense_layers = 2\.5, expected"),
        (LFM2_MOE, {"num_dense_layers": 5}, "num_dense_layers = 5, expected"),
    ],
)
def test_unsupported_hybrid_config_is_refused_in_one_line(
    tmp_path: Path, values: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(CheckpointError, match=text) as caught:
        read(tmp_path, {**values, **changes})
    assert "\n" not in str(caught.value)
