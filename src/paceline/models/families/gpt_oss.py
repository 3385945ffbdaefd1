"""gpt-oss."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families.family import Family, GgufFormat, Layers
from paceline.models.gguf.fields import GatingFunction, GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import ClampedSwiGLU, DenseMLP, ExpertMLP


def _gpt_oss_layers(builder: LayerBuilder) -> Layers:
    fields = builder.fields
    builder.require_rope_parameters()
    activation = ClampedSwiGLU(fields.positive_number("swiglu_alpha"), fields.positive_number("swiglu_limit"))
    expert = DenseMLP(intermediate_size=fields.integer("intermediate_size"), activation=activation, bias=True)
    routing = builder.routing(count_fields=("num_experts_per_tok", "experts_per_token"))
    experts = ExpertMLP(routing=replace(routing, has_normalized_weights=True, has_router_bias=True), expert=expert)
    attention = builder.attention(bias=fields.flag("attention_bias", default=True), has_sinks=True)
    return builder.layers(attention, experts, is_sliding=builder.sliding_layers(2))


def _gpt_oss_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    gating = (GatingFunction.SOFTMAX, GatingFunction.SOFTMAX_OF_SELECTED)
    experts, scaling = fields.read_experts(width=config["intermediate_size"], gating=gating), config.get("rope_scaling")
    return {
        **experts,
        "sliding_window": fields.count("attention.sliding_window"),
        **fields.read_layer_types(config["num_hidden_layers"]),
        "intermediate_size": experts["moe_intermediate_size"],
        **({} if scaling is None else {"rope_scaling": {**scaling, "truncate": False}}),
    }


FAMILIES = (
    Family(
        name="gpt_oss",
        architecture="GptOssForCausalLM",
        model_names="gpt-oss",
        third_party_head_methods=("eagle3", "dflash"),
        build_layers=_gpt_oss_layers,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        module_names={"router": "mlp.router"},
        has_mxfp4_experts=True,
        gguf=GgufFormat(
            architectures=("gpt-oss",),
            read_extra_fields=_gpt_oss_gguf_fields,
            module_names={"mlp_norm": "post_attention_norm"},
            has_untied_output=True,
        ),
    ),
)
