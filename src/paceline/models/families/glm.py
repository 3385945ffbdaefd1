"""GLM-4 and GLM-4.5."""

from collections.abc import Mapping
from typing import Any

from paceline.models.families.experts import experts_with_shared, grouped_experts_gguf_fields, grouped_topk_routing
from paceline.models.families.family import Family, GgufFormat, Layers
from paceline.models.gguf.fields import GatingFunction, GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import NormOrder, QKNorm


def _glm4_layers(builder: LayerBuilder) -> Layers:
    attention = builder.attention(bias=builder.fields.flag("attention_bias", default=True), output_bias=False)
    return builder.layers(attention, builder.mlp(), norm_order=NormOrder.SANDWICH)


def _glm4_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    if (sections := fields.architecture_value("rope.dimension_sections")) is not None:
        fields.raise_invalid("rope.dimension_sections", sections, "none: images are not read")
    return {}


def _glm4_moe_layers(builder: LayerBuilder) -> Layers:
    experts = experts_with_shared(builder, grouped_topk_routing(builder), builder.fields.number("n_shared_experts", 1))
    num_dense = builder.fields.integer("first_k_dense_replace", 1, minimum=0, maximum=builder.num_layers)
    mlps = [builder.mlp() if layer < num_dense else experts for layer in range(builder.num_layers)]
    qk_norm = QKNorm.HEAD if builder.flag("use_qk_norm") else QKNorm.NONE
    attention = builder.attention(bias=builder.flag("attention_bias"), output_bias=False, qk_norm=qk_norm)
    return builder.layers(attention, mlps)


def _glm4_moe_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **fields.read_experts(width=config["intermediate_size"], gating=(GatingFunction.SIGMOID,)),
        **grouped_experts_gguf_fields(fields, config),
        "use_qk_norm": fields.has_tensor("blk.0.attn_q_norm.weight"),
    }


FAMILIES = (
    Family(
        name="glm4",
        architecture="Glm4ForCausalLM",
        model_names="GLM-4-0414",
        build_layers=_glm4_layers,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-7,
            "partial_rotary_factor": 0.5,
            "eos_token_id": [151329, 151336, 151338],
        },
        has_partial_rope=True,
        has_interleaved_rope=True,
        module_names={
            "attention_output_norm": "post_self_attn_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
        },
        has_fused_projections=True,
        gguf=GgufFormat(architectures=("glm4",), read_extra_fields=_glm4_gguf_fields, has_interleaved_rope=True),
    ),
    Family(
        name="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        model_names="GLM-4.5, GLM-4.6",
        bundled_drafters=("mtp",),
        build_layers=_glm4_moe_layers,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": True,
        },
        has_partial_rope=True,
        module_names={"shared_expert": "mlp.shared_experts"},
        gguf=GgufFormat(
            architectures=("glm4moe",), read_extra_fields=_glm4_moe_gguf_fields, module_names={"mlp_norm": "post_attention_norm"}
        ),
    ),
)
