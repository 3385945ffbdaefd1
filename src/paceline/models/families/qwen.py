"""Qwen2 and Qwen3, dense and with experts, and MiMo. `qwen_hybrid.py` has Qwen3-Next and later models."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.models.families.experts import mlps_with_experts
from paceline.models.families.family import Family, GgufFormat, Layers
from paceline.models.gguf.fields import GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import ExpertMLP, QKNorm


def _qwen2_layers(builder: LayerBuilder) -> Layers:
    return builder.layers(builder.attention(bias=True, output_bias=False), builder.mlp(), is_sliding=_sliding_layers(builder))


def _qwen3_layers(builder: LayerBuilder) -> Layers:
    attention = builder.attention(bias=builder.flag("attention_bias"), qk_norm=QKNorm.HEAD)
    return builder.layers(attention, builder.mlp(), is_sliding=_sliding_layers(builder))


def _sliding_layers(builder: LayerBuilder) -> Sequence[bool]:
    """Return for each layer whether it has a sliding window. Without `layer_types`, layers from `max_window_layers` on have one."""
    if not builder.flag("use_sliding_window"):
        return ()
    types = builder.fields.values.get("layer_types")
    if isinstance(types, list):  # pruned models may list more layers than they have
        kinds = [*types[: builder.num_layers], *["full_attention"] * (builder.num_layers - len(types))]
        return [kind == "sliding_attention" for kind in kinds]
    first = builder.fields.number("max_window_layers", 28)
    return [layer >= first for layer in range(builder.num_layers)]


def _qwen2_moe_layers(builder: LayerBuilder) -> Layers:
    experts = ExpertMLP(
        routing=builder.routing(),
        expert=builder.mlp(width_field="moe_intermediate_size"),
        shared_expert=builder.mlp(width_field="shared_expert_intermediate_size"),
        has_shared_expert_gate=True,
    )
    if builder.fields.values.get("layer_types") is not None:
        is_sliding = builder.sliding_layers()
    else:
        last = builder.fields.number("max_window_layers", 28)
        is_sliding = [layer % 2 == 0 and layer < last for layer in range(builder.num_layers)]
    attention = builder.attention(bias=builder.fields.flag("qkv_bias", default=True), output_bias=False)
    is_sliding = is_sliding if builder.flag("use_sliding_window") else []
    return builder.layers(attention, mlps_with_experts(builder, experts), is_sliding=is_sliding)


def _qwen3_moe_layers(builder: LayerBuilder) -> Layers:
    is_sliding = builder.flag("use_sliding_window")
    attention = builder.attention(bias=builder.flag("attention_bias"), qk_norm=QKNorm.HEAD)
    experts = ExpertMLP(routing=builder.routing(), expert=builder.mlp(width_field="moe_intermediate_size"))
    return builder.layers(attention, mlps_with_experts(builder, experts), is_sliding=[is_sliding] * builder.num_layers)


def _qwen2_moe_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    shared = fields.count("expert_shared_feed_forward_length", fields.num_tensor_rows("blk.0.ffn_gate_shexp.weight"))
    return {**fields.read_experts(width=config["intermediate_size"]), "shared_expert_intermediate_size": shared}


_DENSE_DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}
_EXPERT_DEFAULT_FIELDS = {"max_position_embeddings": 32768, "sliding_window": 4096}
FAMILIES = (
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        model_names="Qwen2, Qwen2.5",
        third_party_head_methods=("eagle",),
        build_layers=_qwen2_layers,
        defaults=_DENSE_DEFAULTS,
        gguf=GgufFormat(architectures=("qwen2",)),
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        model_names="Qwen3",
        third_party_head_methods=("eagle3", "dflash", "dspark", "pard2"),
        build_layers=_qwen3_layers,
        defaults={**_DENSE_DEFAULTS, "head_dim": 128},
        gguf=GgufFormat(architectures=("qwen3",)),
    ),
    Family(
        name="mimo",  # Qwen2 with an MTP module
        architecture="MiMoForCausalLM",
        model_names="MiMo 7B",
        bundled_drafters=("mtp",),
        build_layers=_qwen2_layers,
        defaults=_DENSE_DEFAULTS,
    ),
    Family(
        name="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        model_names="Qwen1.5-MoE, Qwen2-MoE",
        build_layers=_qwen2_moe_layers,
        defaults={
            **_EXPERT_DEFAULT_FIELDS,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        gguf=GgufFormat(architectures=("qwen2moe",), read_extra_fields=_qwen2_moe_gguf_fields, has_untied_output=True),
    ),
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        model_names="Qwen3-MoE",
        build_layers=_qwen3_moe_layers,
        defaults={**_EXPERT_DEFAULT_FIELDS, "num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        gguf=GgufFormat(
            architectures=("qwen3moe",),
            read_extra_fields=lambda fields, config: fields.read_experts(width=config["intermediate_size"], is_normalized=True),
        ),
    ),
)
