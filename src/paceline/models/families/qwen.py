"""Qwen2 and Qwen3, dense and with experts, and MiMo. The hybrids since Qwen3-Next are in `qwen_hybrid.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.models.families.experts import expert_layers
from paceline.models.families.family import Family, GgufFormat
from paceline.models.gguf.fields import GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import ExpertMLP, LayerConfig, QKNorm

Layers = tuple[LayerConfig, ...]


def _qwen2_layers(build: LayerBuilder) -> Layers:
    return build.layers(build.attention(bias=True), build.mlp(), is_sliding=_sliding_layers(build))


def _qwen3_layers(build: LayerBuilder) -> Layers:
    bias = build.flag("attention_bias")
    attention = build.attention(bias=bias, output_bias=bias, qk_norm=QKNorm.HEAD)
    return build.layers(attention, build.mlp(), is_sliding=_sliding_layers(build))


def _sliding_layers(build: LayerBuilder) -> Sequence[bool]:
    """Return for each layer whether it has a sliding window: as `layer_types` lists them, or from `max_window_layers` on."""
    if not build.flag("use_sliding_window"):
        return ()
    types = build.fields.values.get("layer_types")
    if isinstance(types, list):  # pruned models may keep the whole list of the original model
        kinds = [*types[: build.num_layers], *["full_attention"] * (build.num_layers - len(types))]
        return [kind == "sliding_attention" for kind in kinds]
    first = build.fields.number("max_window_layers", 28)
    return [layer >= first for layer in range(build.num_layers)]


def _qwen2_moe_layers(build: LayerBuilder) -> Layers:
    experts = ExpertMLP(
        routing=build.routing(),
        expert=build.mlp(size="moe_intermediate_size"),
        shared=build.mlp(size="shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    is_listed = build.fields.values.get("layer_types") is not None
    last = build.fields.number("max_window_layers", 28)
    is_sliding = [layer % 2 == 0 and layer < last for layer in range(build.num_layers)] if not is_listed else build.sliding_layers()
    attention = build.attention(bias=build.fields.flag("qkv_bias", default=True))
    return build.layers(attention, expert_layers(build, experts), is_sliding=is_sliding if build.flag("use_sliding_window") else ())


def _qwen3_moe_layers(build: LayerBuilder) -> Layers:
    bias, is_sliding = build.flag("attention_bias"), build.flag("use_sliding_window")
    attention = build.attention(bias=bias, output_bias=bias, qk_norm=QKNorm.HEAD)
    experts = ExpertMLP(routing=build.routing(), expert=build.mlp(size="moe_intermediate_size"))
    return build.layers(attention, expert_layers(build, experts), is_sliding=[is_sliding] * build.num_layers)


def _qwen2_moe_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    shared = fields.count("expert_shared_feed_forward_length", fields.num_rows_of("blk.0.ffn_gate_shexp.weight"))
    return {**fields.read_experts(width=config["intermediate_size"]), "shared_expert_intermediate_size": shared}


def _qwen3_moe_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return fields.read_experts(width=config["intermediate_size"], normalizes=True)


_DENSE = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}
_EXPERTS = {"max_position_embeddings": 32768, "sliding_window": 4096}
FAMILIES = (
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        models="Qwen2, Qwen2.5",
        published_heads=("eagle",),
        layers=_qwen2_layers,
        defaults=_DENSE,
        gguf=GgufFormat(architectures=("qwen2",)),
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        models="Qwen3",
        published_heads=("eagle3",),
        layers=_qwen3_layers,
        defaults={**_DENSE, "head_dim": 128},
        gguf=GgufFormat(architectures=("qwen3",)),
    ),
    Family(
        name="mimo",  # MiMo is a Qwen2 with a module for multi-token prediction
        architecture="MiMoForCausalLM",
        models="MiMo 7B",
        bundled_drafters=("mtp",),
        layers=_qwen2_layers,
        defaults=_DENSE,
    ),
    Family(
        name="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        models="Qwen1.5-MoE, Qwen2-MoE",
        layers=_qwen2_moe_layers,
        defaults={
            **_EXPERTS,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        gguf=GgufFormat(architectures=("qwen2moe",), read_config=_qwen2_moe_gguf_fields, has_untied_output=True),
    ),
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        models="Qwen3-MoE",
        layers=_qwen3_moe_layers,
        defaults={**_EXPERTS, "num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        gguf=GgufFormat(architectures=("qwen3moe",), read_config=_qwen3_moe_gguf_fields),
    ),
)
