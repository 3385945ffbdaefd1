"""OLMo 2, OLMo 3 and OLMoE."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.models.families.family import Family, GgufFormat, Layers, sliding_window_gguf_fields
from paceline.models.gguf.fields import GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import ExpertMLP, NormOrder, QKNorm


def _olmo2_layers(builder: LayerBuilder, is_sliding: Sequence[bool] = ()) -> Layers:
    bias = builder.flag("attention_bias")
    attention = builder.attention(bias=bias, output_bias=bias, qk_norm=QKNorm.WIDTH)
    return builder.layers(attention, builder.mlp(), norm_order=NormOrder.POST, is_sliding=is_sliding)


def _olmo3_layers(builder: LayerBuilder) -> Layers:
    return _olmo2_layers(builder, builder.sliding_layers(4))


def _olmo3_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**sliding_window_gguf_fields(fields, config), "rope_local_base_freq": config["rope_theta"]}


def _olmoe_layers(builder: LayerBuilder) -> Layers:
    bias = builder.flag("attention_bias")
    attention = builder.attention(bias=bias, output_bias=bias, qk_norm=QKNorm.WIDTH)
    return builder.layers(attention, ExpertMLP(routing=builder.routing(), expert=builder.mlp()))


def _olmoe_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    experts = fields.read_experts(width=config["intermediate_size"])
    return {**experts, "intermediate_size": experts["moe_intermediate_size"]}


FAMILIES = (
    Family(
        name="olmo2",
        architecture="Olmo2ForCausalLM",
        models="OLMo 2",
        layers=_olmo2_layers,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
        gguf=GgufFormat(
            architectures=("olmo2",),
            read_extra_fields=sliding_window_gguf_fields,
            has_untied_output=True,
        ),
    ),
    Family(
        name="olmo3",
        architecture="Olmo3ForCausalLM",
        models="OLMo 3",
        layers=_olmo3_layers,
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "rope_local_base_freq": 5e5,
            "sliding_window": 4096,
            "eos_token_id": 50279,
        },
        has_local_rope=True,
        needs_local_rope=True,
        gguf=GgufFormat(
            architectures=("olmo2",),
            matches=lambda fields: bool(fields.architecture_value("attention.sliding_window")),
            read_extra_fields=_olmo3_gguf_fields,
            has_untied_output=True,
        ),
    ),
    Family(
        name="olmoe",
        architecture="OlmoeForCausalLM",
        models="OLMoE",
        layers=_olmoe_layers,
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "eos_token_id": 50279,
        },
        fixed_fields={"clip_qkv": None},
        gguf=GgufFormat(architectures=("olmoe",), read_extra_fields=_olmoe_gguf_fields, has_untied_output=True),
    ),
)
