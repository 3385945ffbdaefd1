"""Models with multi-head latent attention (MLA): DeepSeek-V2 and V3, and models of the same form by others."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.errors import CheckpointError, shortened
from paceline.models.families.experts import experts_with_shared, grouped_experts_gguf_fields, grouped_topk_routing
from paceline.models.families.family import Family, GgufFormat, Layers, special_ids
from paceline.models.gguf.fields import GatingFunction, GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import AttentionConfig, ExpertRouting, LatentProjections, RouterScoring

_GREEDY, _BY_GROUP = "greedy", "group_limited_greedy"
_MAX_SIZE = 1024
"""Limit of the number of heads and of their sizes: shapes are listed by head before they are compared with the stored tensors."""
_LATENT_KEYS = {
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_nope_head_dim": "attention.key_length_mla",
    "v_head_dim": "attention.value_length_mla",
}
"""Metadata keys of the sizes of latent attention."""


def _latent_attention(builder: LayerBuilder) -> AttentionConfig:
    """Return multi-head latent attention, with one key head of kv_lora_rank + qk_rope_head_dim values."""
    fields, heads, rope = builder.fields, builder.num_heads, builder.rope
    if builder.num_kv_heads != heads:
        raise CheckpointError(
            f"{fields.path}: num_key_value_heads = {builder.num_kv_heads} is not supported for {builder.family.name}, only "
            f"num_attention_heads = {heads} is: all heads share one latent"
        )
    if heads > _MAX_SIZE:
        raise CheckpointError(f"{fields.path}: num_attention_heads = {heads}, expected at most {_MAX_SIZE}")
    query_size, rope_size = fields.integer("qk_nope_head_dim", most=_MAX_SIZE), builder.head_size
    rank = fields.integer("q_lora_rank") if fields.values.get("q_lora_rank") is not None else 0
    # Source: the attention of these models in transformers 5.23: with scaled frequencies, scores are multiplied by mscale squared.
    mscale = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0 if rope.mscale_all_dim and rope.factor > 1 else 1.0
    return builder.attention(
        scale=float((query_size + rope_size) ** -0.5 * mscale * mscale),
        num_kv_heads=1,
        head_size=fields.integer("kv_lora_rank") + rope_size,
        latent=LatentProjections(
            query_rank=rank, query_size=query_size, rope_size=rope_size, value_size=fields.integer("v_head_dim", most=_MAX_SIZE)
        ),
    )


def _layers_with_experts(builder: LayerBuilder, routing: ExpertRouting, is_dense: list[bool]) -> Layers:
    experts = experts_with_shared(builder, routing, builder.fields.integer("n_shared_experts", least=0))
    return builder.layers(_latent_attention(builder), [builder.mlp() if dense else experts for dense in is_dense])


def _first_layers_dense(builder: LayerBuilder) -> list[bool]:
    num_dense = builder.fields.integer("first_k_dense_replace", least=0, most=builder.num_layers)
    return [layer < num_dense for layer in range(builder.num_layers)]


def _deepseek_v2_layers(builder: LayerBuilder) -> Layers:
    method = builder.fields.values.get("topk_method")
    if method not in (_GREEDY, _BY_GROUP):
        raise CheckpointError(
            f"{builder.fields.path}: topk_method = {shortened(method)} is not supported, only {_GREEDY!r} and {_BY_GROUP!r} are"
        )
    routing = grouped_topk_routing(builder) if method == _BY_GROUP else builder.routing()
    routing = replace(
        routing,
        scoring=RouterScoring.SOFTMAX,
        scores_per_group=1,
        has_correction_bias=False,
        factor=builder.fields.number("routed_scaling_factor", 1.0),
    )
    return _layers_with_experts(builder, routing, _first_layers_dense(builder))


def _deepseek_v3_layers(builder: LayerBuilder) -> Layers:
    return _layers_with_experts(builder, grouped_topk_routing(builder), _first_layers_dense(builder))


def _glm4_moe_lite_layers(builder: LayerBuilder) -> Layers:
    types = builder.layer_values("mlp_layer_types", lambda kind: kind in ("dense", "sparse"), "dense or sparse")
    if types is None:
        return _deepseek_v3_layers(builder)
    return _layers_with_experts(builder, grouped_topk_routing(builder), [kind == "dense" for kind in types])


def _latent_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    key, scaling = "rope.scaling.yarn_log_multiplier", config.get("rope_scaling") or {}
    if scaling and fields.architecture_value(key):  # converters store 0.1 mscale_all_dim
        scaling = {**scaling, **dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * fields.number(key), 6))}
    return {
        "rope_scaling": scaling or None,
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": fields.architecture_value("attention.q_lora_rank") or None,
        "kv_lora_rank": fields.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": fields.count("attention.key_length_mla") - config["head_dim"],
        "v_head_dim": fields.count("attention.value_length_mla"),
    }


def _gguf_fields(gating: GatingFunction, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    grouped = grouped_experts_gguf_fields(fields, config)
    return {
        **fields.read_experts(gating=(gating,)),
        **_latent_gguf_fields(fields, config),
        **grouped,
        "topk_method": "noaux_tc" if gating is GatingFunction.SIGMOID else _BY_GROUP if grouped["n_group"] > 1 else _GREEDY,
    }


def _has_no_experts(fields: GgufFields) -> bool:
    return not fields.architecture_value("expert_count")


def _has_sigmoid_router(fields: GgufFields) -> bool:
    return not _has_no_experts(fields) and bool(fields.architecture_value("expert_gating_func") == GatingFunction.SIGMOID)


def _gguf_format(gating: GatingFunction) -> GgufFormat:
    """Return the format of files whose router has this function. llama.cpp has one architecture for all these models."""
    return GgufFormat(
        architectures=("deepseek2",),
        matches=_has_sigmoid_router if gating is GatingFunction.SIGMOID else None,
        read_extra_fields=partial(_gguf_fields, gating),
        metadata_keys={**_LATENT_KEYS, "n_shared_experts": "expert_shared_count", "routed_scaling_factor": "expert_weights_scale"},
        has_latent_attention=True,
    )


_SIZES = {"head_dim": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
_FIXED_FIELDS = {"attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1, "rope_interleave": True}
_DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    models="DeepSeek-V3, DeepSeek-R1, Moonlight",
    bundled_drafters=("mtp",),
    layers=_deepseek_v3_layers,
    defaults={
        **_SIZES,
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        **special_ids(0, 1),
    },
    fixed_fields={**_FIXED_FIELDS, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    field_aliases={"qk_rope_head_dim": "head_dim"},
    module_names={"shared_expert": "mlp.shared_experts"},
    gguf=_gguf_format(GatingFunction.SIGMOID),
)
FAMILIES = (
    replace(
        _DEEPSEEK_V3,
        name="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        models="DeepSeek-V2, DeepSeek-V2-Lite",
        bundled_drafters=(),
        layers=_deepseek_v2_layers,
        defaults={
            **_SIZES,
            "max_position_embeddings": 2048,
            "q_lora_rank": 1536,
            "n_routed_experts": 64,
            "moe_intermediate_size": 1407,
            "n_shared_experts": 2,
            "topk_method": _GREEDY,
            "first_k_dense_replace": 0,
            **special_ids(1, 2),
        },
        # transformers does not normalise weights whatever norm_topk_prob, other programs do.
        fixed_fields={**_FIXED_FIELDS, "scoring_func": "softmax", "norm_topk_prob": False},
        gguf=_gguf_format(GatingFunction.SOFTMAX),
    ),
    # Moonshot's name for DeepSeek-V3's network. It precedes that family, which a config.json without `model_type` belongs to.
    replace(_DEEPSEEK_V3, name="kimi_k2", models="Kimi-K2", bundled_drafters=(), gguf=None, gguf_family="deepseek_v3"),
    _DEEPSEEK_V3,
    replace(
        _DEEPSEEK_V3,
        name="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        models="GLM-4.7-Flash",
        layers=_glm4_moe_lite_layers,
        defaults={
            **_SIZES,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
            **special_ids(0, 1),
        },
        gguf=None,
        gguf_family="deepseek_v3",
    ),
    replace(
        _DEEPSEEK_V3,
        name="youtu",
        architecture="YoutuForCausalLM",
        models="Youtu-LLM",
        bundled_drafters=(),
        layers=lambda builder: builder.layers(_latent_attention(builder), builder.mlp()),
        defaults={
            **_SIZES,
            "max_position_embeddings": 131072,
            "q_lora_rank": 1536,
            "tie_word_embeddings": True,
            **special_ids(128000, 128001),
        },
        fixed_fields={"attention_bias": False, "mlp_bias": False, "rope_interleave": True},
        gguf=GgufFormat(
            architectures=("deepseek2",),
            matches=_has_no_experts,
            read_extra_fields=_latent_gguf_fields,
            metadata_keys=_LATENT_KEYS,
            has_latent_attention=True,
        ),
    ),
)
