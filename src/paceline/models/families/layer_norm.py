"""Families with layer norms instead of RMS norms: StarCoder2, StableLM, Phi-1 and Phi-2, Command R and Aya."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.models.families.family import Family, GgufFormat, Layers, sliding_window_gguf_fields, special_ids
from paceline.models.gguf.fields import GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import Activation, NormOrder

_GELU_TANH_ACTIVATIONS = {"gelu_pytorch_tanh": Activation.GELU_TANH, "gelu_new": Activation.GELU_TANH}
"""config.json names of the tanh approximation of GELU. "gelu" is the exact function, which is not supported."""
_NORM_EPS_KEY = "attention.layer_norm_epsilon"


def _starcoder2_layers(builder: LayerBuilder) -> Layers:
    bias = builder.fields.flag("use_bias", default=True)
    mlp = builder.mlp(bias=bias, has_gate=False, activations=_GELU_TANH_ACTIVATIONS)
    attention, is_sliding = builder.attention(bias=bias), [True] * builder.num_layers
    return builder.layers(attention, mlp, is_sliding=is_sliding, has_layer_norm=True, has_norm_bias=True)


def _stablelm_layers(builder: LayerBuilder) -> Layers:
    attention = builder.attention(bias=builder.flag("use_qkv_bias"), output_bias=False)
    order = NormOrder.PARALLEL if builder.flag("use_parallel_residual") else NormOrder.PRE
    return builder.layers(attention, builder.mlp(), norm_order=order, has_layer_norm=True, has_norm_bias=True)


def _phi_layers(builder: LayerBuilder) -> Layers:
    attention, mlp = builder.attention(bias=True), builder.mlp(bias=True, has_gate=False, activations=_GELU_TANH_ACTIVATIONS)
    return builder.layers(attention, mlp, norm_order=NormOrder.PARALLEL, has_layer_norm=True, has_norm_bias=True)


def _cohere_layers(builder: LayerBuilder, *, is_sliding: Sequence[bool] = (), has_rope: Sequence[bool] = ()) -> Layers:
    attention, mlp = builder.attention(bias=builder.flag("attention_bias")), builder.mlp()
    order = NormOrder.PARALLEL
    return builder.layers(attention, mlp, norm_order=order, is_sliding=is_sliding, has_rope=has_rope, has_layer_norm=True)


def _cohere2_layers(builder: LayerBuilder) -> Layers:
    """Return the layers. Only layers with a sliding window have rotary embeddings."""
    is_sliding, has_window = builder.sliding_layers(4), builder.fields.values.get("sliding_window") is not None
    return _cohere_layers(builder, is_sliding=is_sliding, has_rope=[sliding and has_window for sliding in is_sliding])


def _cohere_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:  # as fields of a config.json
    return {"logit_scale": fields.number("logit_scale")}


def _starcoder2_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `use_bias`. There is no sliding window: llama.cpp ignores StarCoder2's window of 4096 positions."""
    return {"use_bias": config["attention_bias"]}


def _stablelm_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_qkv_bias": config["attention_bias"], "use_parallel_residual": not fields.has_tensor("blk.0.ffn_norm.weight")}


_COHERE_FAMILY = Family(
    name="cohere",
    architecture="CohereForCausalLM",
    model_names="Command R, Aya 23, Aya Expanse",
    build_layers=_cohere_layers,
    defaults={
        "max_position_embeddings": 8192,
        "num_attention_heads": 64,
        "lm_head_multiplier": 0.0625,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        **special_ids(5, 255001),
    },
    required_field_values={"use_qk_norm": False},
    has_embedding_and_logit_multipliers=True,
    has_interleaved_rope=True,
    field_aliases={"layer_norm_eps": "rms_norm_eps", "logit_scale": "lm_head_multiplier"},
    gguf=GgufFormat(
        architectures=("command-r",), read_extra_fields=_cohere_gguf_fields, has_interleaved_rope=True, norm_eps_key=_NORM_EPS_KEY
    ),
)
FAMILIES = (
    _COHERE_FAMILY,
    replace(
        _COHERE_FAMILY,
        name="cohere2",
        architecture="Cohere2ForCausalLM",
        model_names="Command R7B, Command A",
        build_layers=_cohere2_layers,
        defaults={**_COHERE_FAMILY.defaults, "sliding_window": 4096},
        required_field_values={},
        gguf=GgufFormat(
            architectures=("cohere2",),
            read_extra_fields=lambda fields, config: _cohere_gguf_fields(fields, config) | sliding_window_gguf_fields(fields, config),
            has_interleaved_rope=True,
            norm_eps_key=_NORM_EPS_KEY,
        ),
    ),
    Family(
        name="starcoder2",
        architecture="Starcoder2ForCausalLM",
        model_names="StarCoder2",
        build_layers=_starcoder2_layers,
        defaults={
            "max_position_embeddings": 4096,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            **special_ids(50256, 50256),
        },
        module_names={"up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj"},
        field_aliases={"norm_epsilon": "rms_norm_eps"},
        gguf=GgufFormat(architectures=("starcoder2",), read_extra_fields=_starcoder2_gguf_fields, norm_eps_key=_NORM_EPS_KEY),
    ),
    Family(
        name="stablelm",
        architecture="StableLmForCausalLM",
        model_names="StableLM 3B, StableLM 2 1.6B",
        build_layers=_stablelm_layers,
        defaults={
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-5,
            **special_ids(0, 0),
        },
        required_field_values={"qk_layernorm": False},
        has_partial_rope=True,
        field_aliases={"layer_norm_eps": "rms_norm_eps"},
        gguf=GgufFormat(architectures=("stablelm",), read_extra_fields=_stablelm_gguf_fields, norm_eps_key=_NORM_EPS_KEY),
    ),
    Family(
        name="phi",
        architecture="PhiForCausalLM",
        model_names="Phi-1, Phi-1.5, Phi-2",
        build_layers=_phi_layers,
        defaults={
            "max_position_embeddings": 2048,
            "num_attention_heads": 32,
            "partial_rotary_factor": 0.5,
            "hidden_act": "gelu_new",
            "rms_norm_eps": 1e-5,
            **special_ids(1, 2),
        },
        required_field_values={"qk_layernorm": False, "tie_word_embeddings": False},  # with tied embeddings, lm_head would have no bias
        module_names={"final_norm": "model.final_layernorm", "o_proj": "self_attn.dense", "up_proj": "mlp.fc1", "down_proj": "mlp.fc2"},
        has_lm_head_bias=True,
        has_partial_rope=True,
        has_fused_projections=True,
        field_aliases={"layer_norm_eps": "rms_norm_eps"},
        gguf=GgufFormat(architectures=("phi2",), norm_eps_key=_NORM_EPS_KEY),
    ),
)
