"""Models with multi-head latent attention (MLA): DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash and Youtu-LLM."""

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

_GREEDY_TOPK, _GROUPED_TOPK = "greedy", "group_limited_greedy"
_MAX_HEADS = _MAX_HEAD_SIZE = 1024
"""Largest accepted number of heads, and of values in a head. Tensors of these sizes are described before the file is checked."""
_LATENT_GGUF_KEYS = {
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_nope_head_dim": "attention.key_length_mla",
    "v_head_dim": "attention.value_length_mla",
}
"""GGUF metadata keys of the sizes of latent attention, by config.json field."""


def _latent_attention(builder: LayerBuilder) -> AttentionConfig:
    """Return multi-head latent attention, with one key head of kv_lora_rank + qk_rope_head_dim values."""
    fields, heads, rope = builder.fields, builder.num_heads, builder.rope
    if builder.num_kv_heads != heads:
        raise CheckpointError(
            f"{fields.path}: num_key_value_heads = {builder.num_kv_heads} is not supported for {builder.family.name}, only "
            f"num_attention_heads = {heads} is: all heads share one latent"
        )
    if heads > _MAX_HEADS:
        raise CheckpointError(f"{fields.path}: num_attention_heads = {heads}, expected at most {_MAX_HEADS}")
    unrotated_size, rope_size = fields.integer("qk_nope_head_dim", maximum=_MAX_HEAD_SIZE), builder.head_size
    value_size = fields.integer("v_head_dim", maximum=_MAX_HEAD_SIZE)
    rank = fields.integer("q_lora_rank") if fields.values.get("q_lora_rank") is not None else 0
    # As in transformers 5.23: if rotary frequencies are scaled, attention scores are multiplied by mscale squared.
    mscale = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0 if rope.mscale_all_dim and rope.factor > 1 else 1.0
    return builder.attention(
        scale=float((unrotated_size + rope_size) ** -0.5 * mscale * mscale),
        num_kv_heads=1,
        head_size=fields.integer("kv_lora_rank") + rope_size,
        latent=LatentProjections(query_rank=rank, unrotated_size=unrotated_size, rope_size=rope_size, value_size=value_size),
    )


def _layers_with_experts(builder: LayerBuilder, routing: ExpertRouting, is_dense: list[bool]) -> Layers:
    experts = experts_with_shared(builder, routing, builder.fields.integer("n_shared_experts", minimum=0))
    return builder.layers(_latent_attention(builder), [builder.mlp() if dense else experts for dense in is_dense])


def _dense_layers(builder: LayerBuilder) -> list[bool]:
    num_dense = builder.fields.integer("first_k_dense_replace", minimum=0, maximum=builder.num_layers)
    return [layer < num_dense for layer in range(builder.num_layers)]


def _deepseek_v2_layers(builder: LayerBuilder) -> Layers:
    method = builder.fields.values.get("topk_method")
    if method not in (_GREEDY_TOPK, _GROUPED_TOPK):
        raise CheckpointError(
            f"{builder.fields.path}: topk_method = {shortened(method)} is not supported, only {_GREEDY_TOPK!r} and {_GROUPED_TOPK!r} are"
        )
    routing = grouped_topk_routing(builder) if method == _GROUPED_TOPK else builder.routing()
    routing = replace(
        routing,
        scoring=RouterScoring.SOFTMAX,
        top_scores_per_group=1,
        has_correction_bias=False,
        routed_scaling_factor=builder.fields.number("routed_scaling_factor", 1.0),
    )
    return _layers_with_experts(builder, routing, _dense_layers(builder))


def _deepseek_v3_layers(builder: LayerBuilder) -> Layers:
    return _layers_with_experts(builder, grouped_topk_routing(builder), _dense_layers(builder))


def _glm4_moe_lite_layers(builder: LayerBuilder) -> Layers:
    types = builder.layer_values("mlp_layer_types", lambda kind: kind in ("dense", "sparse"), "dense or sparse")
    if types is None:
        return _deepseek_v3_layers(builder)
    return _layers_with_experts(builder, grouped_topk_routing(builder), [kind == "dense" for kind in types])


def _latent_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    key, scaling = "rope.scaling.yarn_log_multiplier", config.get("rope_scaling") or {}
    if scaling and fields.architecture_value(key):  # GGUF converters store 0.1 * mscale_all_dim
        scaling = {**scaling, **dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * fields.number(key), 6))}
    return {
        "rope_scaling": scaling or None,
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": fields.architecture_value("attention.q_lora_rank") or None,
        "kv_lora_rank": fields.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": fields.count("attention.key_length_mla") - config["head_dim"],
        "v_head_dim": fields.count("attention.value_length_mla"),
    }


def _deepseek_gguf_fields(gating: GatingFunction, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    grouped = grouped_experts_gguf_fields(fields, config)
    return {
        **fields.read_experts(gating=(gating,)),
        **_latent_gguf_fields(fields, config),
        **grouped,
        "topk_method": "noaux_tc" if gating is GatingFunction.SIGMOID else _GROUPED_TOPK if grouped["n_group"] > 1 else _GREEDY_TOPK,
    }


def _has_no_experts(fields: GgufFields) -> bool:
    return not fields.architecture_value("expert_count")


def _has_sigmoid_router(fields: GgufFields) -> bool:
    return not _has_no_experts(fields) and bool(fields.architecture_value("expert_gating_func") == GatingFunction.SIGMOID)


def _deepseek_gguf_format(gating: GatingFunction) -> GgufFormat:
    """Return the GGUF format of models with the router function `gating`. llama.cpp gives DeepSeek-V2 and V3 the same architecture name."""
    return GgufFormat(
        architectures=("deepseek2",),
        matches=_has_sigmoid_router if gating is GatingFunction.SIGMOID else None,
        read_extra_fields=partial(_deepseek_gguf_fields, gating),
        metadata_keys={**_LATENT_GGUF_KEYS, "n_shared_experts": "expert_shared_count", "routed_scaling_factor": "expert_weights_scale"},
        has_latent_attention=True,
    )


_DEFAULT_LATENT_SIZES = {"head_dim": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
_REQUIRED_FIELD_VALUES = {"attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1, "rope_interleave": True}
_DEEPSEEK_V3_FAMILY = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    model_names="DeepSeek-V3, DeepSeek-R1, Moonlight",
    bundled_drafters=("mtp",),
    build_layers=_deepseek_v3_layers,
    defaults={
        **_DEFAULT_LATENT_SIZES,
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
    required_field_values={**_REQUIRED_FIELD_VALUES, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    field_aliases={"qk_rope_head_dim": "head_dim"},
    module_names={"shared_expert": "mlp.shared_experts"},
    gguf=_deepseek_gguf_format(GatingFunction.SIGMOID),
)
FAMILIES = (
    replace(
        _DEEPSEEK_V3_FAMILY,
        name="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        model_names="DeepSeek-V2, DeepSeek-V2-Lite",
        bundled_drafters=(),
        build_layers=_deepseek_v2_layers,
        defaults={
            **_DEFAULT_LATENT_SIZES,
            "max_position_embeddings": 2048,
            "q_lora_rank": 1536,
            "n_routed_experts": 64,
            "moe_intermediate_size": 1407,
            "n_shared_experts": 2,
            "topk_method": _GREEDY_TOPK,
            "first_k_dense_replace": 0,
            **special_ids(1, 2),
        },
        # norm_topk_prob = true is refused: transformers ignores it, other programs normalise the experts' weights.
        required_field_values={**_REQUIRED_FIELD_VALUES, "scoring_func": "softmax", "norm_topk_prob": False},
        gguf=_deepseek_gguf_format(GatingFunction.SOFTMAX),
    ),
    # must precede DeepSeek-V3 in this list: if `model_type` is absent, the last family with the same architecture is used
    replace(_DEEPSEEK_V3_FAMILY, name="kimi_k2", model_names="Kimi-K2", bundled_drafters=(), gguf=None, gguf_family="deepseek_v3"),
    _DEEPSEEK_V3_FAMILY,
    replace(
        _DEEPSEEK_V3_FAMILY,
        name="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        model_names="GLM-4.7-Flash",
        build_layers=_glm4_moe_lite_layers,
        defaults={
            **_DEFAULT_LATENT_SIZES,
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
        _DEEPSEEK_V3_FAMILY,
        name="youtu",
        architecture="YoutuForCausalLM",
        model_names="Youtu-LLM",
        bundled_drafters=(),
        build_layers=lambda builder: builder.layers(_latent_attention(builder), builder.mlp()),
        defaults={
            **_DEFAULT_LATENT_SIZES,
            "max_position_embeddings": 131072,
            "q_lora_rank": 1536,
            "tie_word_embeddings": True,
            **special_ids(128000, 128001),
        },
        required_field_values={"attention_bias": False, "mlp_bias": False, "rope_interleave": True},
        gguf=GgufFormat(
            architectures=("deepseek2",),
            matches=_has_no_experts,
            read_extra_fields=_latent_gguf_fields,
            metadata_keys=_LATENT_GGUF_KEYS,
            has_latent_attention=True,
        ),
    ),
)
