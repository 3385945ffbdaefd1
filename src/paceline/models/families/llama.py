"""Llama, and families with nearly the same layers: Mistral, Mixtral, Phi-3, SmolLM3, Seed-OSS, Arcee, Apertus, Hunyuan."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families.experts import experts_gguf_fields
from paceline.models.families.family import Family, GgufFormat, Layers, sliding_window_gguf_fields, special_ids
from paceline.models.gguf.fields import GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import Activation, ExpertMLP, QKNorm


def _mistral_layers(builder: LayerBuilder) -> Layers:
    return builder.layers(builder.attention(), builder.mlp(), is_sliding=[True] * builder.num_layers)


def _ministral3_layers(builder: LayerBuilder) -> Layers:
    builder.require_rope_parameters()
    return _mistral_layers(builder)


def _ministral3_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` with `llama_4_scaling_beta`, which scales queries by their position."""
    original, length = config.get("original_max_position_embeddings"), fields.architecture_value("attention.temperature_length")
    beta = fields.architecture_value("attention.temperature_scale") or 0.0
    if beta and length not in (None, original):
        fields.raise_invalid("attention.temperature_length", length, f"the original context length, {original}")
    rope = {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {}), "llama_4_scaling_beta": beta}
    return {"rope_parameters": rope, "rope_scaling": None}


def _mixtral_layers(builder: LayerBuilder) -> Layers:
    experts = ExpertMLP(routing=replace(builder.routing(), has_normalized_weights=True), expert=builder.mlp())
    return builder.layers(builder.attention(), experts, is_sliding=[True] * builder.num_layers)


def _smollm3_layers(builder: LayerBuilder) -> Layers:
    has_rope = builder.layers_with_rope()
    if builder.fields.values.get("layer_types") is not None:
        is_sliding = builder.sliding_layers()
    else:
        is_sliding = [builder.flag("use_sliding_window") and not rotates for rotates in has_rope]
    attention, mlp = builder.attention(bias=builder.flag("attention_bias")), builder.mlp(bias=builder.flag("mlp_bias"))
    return builder.layers(attention, mlp, is_sliding=is_sliding, has_rope=has_rope)


def _seed_oss_layers(builder: LayerBuilder) -> Layers:
    attention = builder.attention(bias=builder.fields.flag("attention_bias", default=True), output_bias=builder.flag("attention_out_bias"))
    return builder.layers(attention, builder.mlp(bias=builder.flag("mlp_bias")))


def _apertus_layers(builder: LayerBuilder) -> Layers:
    builder.require_rope_parameters()
    attention = builder.attention(bias=builder.flag("attention_bias"), qk_norm=QKNorm.HEAD)
    return builder.layers(attention, builder.mlp(has_gate=False, activations={"xielu": Activation.XIELU}))


def _apertus_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters`, which this family requires even without rope scaling."""
    return {"rope_parameters": {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}, "rope_scaling": None}


def _hunyuan_layers(builder: LayerBuilder) -> Layers:
    attention = builder.attention(bias=builder.flag("attention_bias"), qk_norm=QKNorm.HEAD_AFTER_ROPE)
    return builder.layers(attention, builder.mlp())


FAMILIES = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        model_names="Llama 1 to 3.3, and what has their shape (Vicuna, TinyLlama, SmolLM2, Yi, MiniCPM5)",
        third_party_head_methods=("medusa", "eagle", "eagle3", "dflash", "pard2"),
        build_layers=lambda builder: builder.layers(
            builder.attention(bias=builder.flag("attention_bias")), builder.mlp(bias=builder.flag("mlp_bias"))
        ),
        defaults={"max_position_embeddings": 2048, **special_ids(1, 2)},
        gguf=GgufFormat(architectures=("llama",), has_interleaved_rope=True),
    ),
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        model_names="Mistral 7B, Mistral Nemo, Mistral Small 3 (text)",
        build_layers=_mistral_layers,
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096, **special_ids(1, 2)},
        gguf_family="llama",
    ),
    Family(
        name="ministral3",
        architecture="Ministral3ForCausalLM",
        model_names="Ministral 3 (text)",
        build_layers=_ministral3_layers,
        defaults={"max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, **special_ids(1, 2)},
        has_temperature_tuning=True,
        gguf=GgufFormat(architectures=("mistral3",), read_extra_fields=_ministral3_gguf_fields, has_interleaved_rope=True),
    ),
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        model_names="Mixtral",
        third_party_head_methods=("eagle",),
        build_layers=_mixtral_layers,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            **special_ids(1, 2),
        },
        mlp_module="block_sparse_moe",
        mlp_tensors={"gate.weight": "gate.weight"},
        gguf=GgufFormat(
            architectures=("llama",),
            matches=lambda fields: bool(fields.architecture_value("expert_count")),
            read_extra_fields=experts_gguf_fields,
            has_interleaved_rope=True,
        ),
    ),
    Family(
        name="phi3",
        architecture="Phi3ForCausalLM",
        model_names="Phi-3, Phi-3.5, Phi-4-mini",
        build_layers=_mistral_layers,
        defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **special_ids(1, 32000)},
        has_partial_rope=True,
        has_fused_projections=True,
        rope_type_aliases={"su": "longrope", "yarn": "longrope"},  # names of longrope in early checkpoints
        gguf=GgufFormat(architectures=("phi3",), read_extra_fields=sliding_window_gguf_fields),
    ),
    Family(
        name="smollm3",
        architecture="SmolLM3ForCausalLM",
        model_names="SmolLM3",
        build_layers=_smollm3_layers,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            **special_ids(128000, 128001),
        },
        gguf=GgufFormat(architectures=("smollm3",), has_interleaved_rope=True),
    ),
    Family(
        name="seed_oss",
        architecture="SeedOssForCausalLM",
        model_names="Seed-OSS",
        build_layers=_seed_oss_layers,
        defaults={"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, **special_ids(0, 2)},
        gguf=GgufFormat(architectures=("seed_oss",), module_names={"mlp_norm": "post_attention_norm"}),
    ),
    Family(
        name="arcee",
        architecture="ArceeForCausalLM",
        model_names="Arcee AFM",
        build_layers=lambda builder: builder.layers(builder.attention(bias=builder.flag("attention_bias")), builder.mlp(has_gate=False)),
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2", **special_ids(128000, 128001)},
        gguf=GgufFormat(architectures=("arcee",), has_interleaved_rope=True),
    ),
    Family(
        name="apertus",
        architecture="ApertusForCausalLM",
        model_names="Apertus",
        build_layers=_apertus_layers,
        defaults={"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "hidden_act": "xielu", "rope_theta": 12e6, **special_ids(1, 2)},
        required_field_values={"post_norm": False, "qk_norm": True},
        module_names={"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
        gguf=GgufFormat(architectures=("apertus",), read_extra_fields=_apertus_gguf_fields),
    ),
    Family(
        name="hunyuan_v1_dense",
        architecture="HunYuanDenseV1ForCausalLM",
        model_names="Hunyuan 0.5B to 7B (dense)",
        build_layers=_hunyuan_layers,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, **special_ids(1, 2)},
        required_field_values={"use_cla": False, "use_mla": False, "mlp_bias": False},
        has_rope_alpha=True,
        module_names={"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
        gguf=GgufFormat(architectures=("hunyuan-dense",)),
    ),
)
