"""Qwen3-Next and Qwen3.5: most layers have a gated delta net instead of attention."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.models.families.experts import mlps_with_experts
from paceline.models.families.family import Family, GgufFormat, Layers
from paceline.models.families.hybrids import AnyMLP, delta_net_mixer, gguf_layer_count, mixed_layers
from paceline.models.gguf.fields import GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import AttentionGate, ExpertMLP, QKNorm

_DEFAULT_FULL_ATTENTION_INTERVAL = 4  # every 4th layer has attention if a GGUF file has no interval


def _qwen3_5_moe_layers(builder: LayerBuilder) -> Layers:
    experts = _experts_with_shared_gate(builder)
    routing = replace(experts.routing, has_normalized_weights=True)
    return _qwen_hybrid_layers(builder, [replace(experts, routing=routing)] * builder.num_layers)


def _experts_with_shared_gate(builder: LayerBuilder) -> ExpertMLP:
    expert, shared = builder.mlp(width_field="moe_intermediate_size"), builder.mlp(width_field="shared_expert_intermediate_size")
    return ExpertMLP(routing=builder.routing(), expert=expert, shared_expert=shared, has_shared_expert_gate=True)


def _qwen_hybrid_layers(builder: LayerBuilder, mlps: Sequence[AnyMLP]) -> Layers:
    fields = builder.fields
    attention = builder.attention(bias=builder.flag("attention_bias"), qk_norm=QKNorm.HEAD, gate=AttentionGate.VALUE)
    interval = fields.integer("full_attention_interval", 4)
    kinds = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(builder.num_layers)]
    return mixed_layers(builder, {"linear_attention": delta_net_mixer(fields), "full_attention": attention}, mlps, default_types=kinds)


def _qwen_hybrid_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers = gguf_layer_count(fields, config["num_hidden_layers"])
    num_value_heads, inner = fields.count("ssm.time_step_rank"), fields.count("ssm.inner_size")
    if inner % num_value_heads:
        fields.raise_invalid("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank, {num_value_heads}")
    values: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "layer_types": _read_layer_types(fields, num_layers),
        "linear_num_key_heads": fields.count("ssm.group_count"),
        "linear_num_value_heads": num_value_heads,
        "linear_key_head_dim": fields.count("ssm.state_size"),
        "linear_value_head_dim": inner // num_value_heads,
        "linear_conv_kernel_dim": fields.count("ssm.conv_kernel"),
    }
    if fields.architecture_value("expert_count"):
        shared = fields.count("expert_shared_feed_forward_length", fields.num_tensor_rows("blk.0.ffn_gate_shexp.weight"))
        values |= {**fields.read_experts(), "shared_expert_intermediate_size": shared, "norm_topk_prob": True}
    return values


def _read_layer_types(fields: GgufFields, num_layers: int) -> list[str]:
    key = "attention.recurrent_layers"
    is_recurrent = fields.architecture_value(key)
    if is_recurrent is None:
        interval = fields.count("full_attention_interval", _DEFAULT_FULL_ATTENTION_INTERVAL)
        is_recurrent = [(layer + 1) % interval > 0 for layer in range(num_layers)]
    if not isinstance(is_recurrent, list) or len(is_recurrent) < num_layers or any(flag not in (0, 1) for flag in is_recurrent):
        fields.raise_invalid(key, is_recurrent, f"whether each of {num_layers} layers is recurrent")
    return ["linear_attention" if flag else "full_attention" for flag in is_recurrent[:num_layers]]


_DEFAULT_FIELDS = {
    "max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25, "num_attention_heads": 16,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
_EXPERT_DEFAULT_FIELDS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_key_value_heads": 2}
_GGUF_FORMAT = GgufFormat(
    architectures=("qwen35",),
    read_extra_fields=_qwen_hybrid_gguf_fields,
    metadata_keys={
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "linear_key_head_dim": "ssm.state_size",
        "linear_value_head_dim": "ssm.inner_size",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
    },
    module_names={"mlp_norm": "post_attention_norm"},
    interleaves_value_heads_of_key_heads=True,
)
_QWEN3_5_FAMILY = Family(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    model_names="Qwen3.5, Qwen3.6 (text)",
    bundled_drafters=("mtp",),
    third_party_head_methods=("dflash", "dflash2"),
    build_layers=lambda builder: _qwen_hybrid_layers(builder, [builder.mlp()] * builder.num_layers),
    defaults={**_DEFAULT_FIELDS, "num_key_value_heads": 4},
    required_field_values={"attn_output_gate": True},
    has_partial_rope=True,
    has_norm_offset=True,
    recurrent_module="linear_attn",
    gguf=_GGUF_FORMAT,
)
FAMILIES = (
    replace(
        _QWEN3_5_FAMILY,
        name="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        model_names="Qwen3-Next, Qwen3-Coder-Next",
        build_layers=lambda builder: _qwen_hybrid_layers(builder, mlps_with_experts(builder, _experts_with_shared_gate(builder))),
        defaults={**_DEFAULT_FIELDS, **_EXPERT_DEFAULT_FIELDS, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
        gguf=replace(_GGUF_FORMAT, architectures=("qwen3next",), interleaves_value_heads_of_key_heads=False),
    ),
    _QWEN3_5_FAMILY,
    replace(
        _QWEN3_5_FAMILY,
        name="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        model_names="Qwen3.5-MoE, Qwen3.6-MoE (text)",
        build_layers=_qwen3_5_moe_layers,
        defaults={**_DEFAULT_FIELDS, **_EXPERT_DEFAULT_FIELDS, "num_experts": 256, "num_experts_per_tok": 8},
        gguf=replace(_GGUF_FORMAT, architectures=("qwen35moe",)),
    ),
)
