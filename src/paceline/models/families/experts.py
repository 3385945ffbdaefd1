"""Mixture-of-experts MLPs and their routing, for several families."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import CheckpointError, shortened
from paceline.models.gguf.fields import GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import DenseMLP, ExpertMLP, ExpertRouting, RouterScoring


def mlps_with_experts(builder: LayerBuilder, experts: ExpertMLP) -> list[DenseMLP | ExpertMLP]:
    """Return the MLP of each layer: experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not list."""
    fields, step = builder.fields, builder.fields.integer("decoder_sparse_step", 1)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"{fields.path}: mlp_only_layers = {shortened(dense)}, expected a list of layers")
    has_experts = [layer not in dense and (layer + 1) % step == 0 for layer in range(builder.num_layers)]
    return [experts if is_sparse else builder.mlp() for is_sparse in has_experts]


def experts_with_shared(builder: LayerBuilder, routing: ExpertRouting, num_shared: float) -> ExpertMLP:
    """Return experts of width `moe_intermediate_size`. The `num_shared` shared experts are one MLP, `num_shared` times as wide."""
    expert = builder.mlp(width_field="moe_intermediate_size")
    shared = replace(expert, intermediate_size=int(expert.intermediate_size * num_shared)) if num_shared else None
    return ExpertMLP(routing=routing, expert=expert, shared_expert=shared)


def experts_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json fields of a family whose experts have the width `intermediate_size`."""
    experts = fields.read_experts(width=config["intermediate_size"])
    return {**experts, "intermediate_size": experts["moe_intermediate_size"]}


def grouped_experts_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json fields for `grouped_topk_routing`, leading dense layers, and the number of layers, MTP modules excluded."""
    return {
        "num_hidden_layers": fields.num_layers_without_mtp(config["num_hidden_layers"]),
        "first_k_dense_replace": fields.architecture_value("leading_dense_block_count") or 0,
        "n_shared_experts": fields.architecture_value("expert_shared_count") or 0,
        "n_group": fields.count("expert_group_count", 1),
        "topk_group": fields.count("expert_group_used_count", 1),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
    }


def grouped_topk_routing(builder: LayerBuilder) -> ExpertRouting:
    """Return DeepSeek-V3's routing: the experts of the best groups compete by score plus a learned correction bias.

    Raises:
        CheckpointError: The groups differ in size, or the selected groups have fewer experts than a token uses.
    """
    fields, routing = builder.fields, builder.routing()
    num_groups, num_selected_groups = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if (
        routing.num_experts % num_groups
        or num_selected_groups > num_groups
        or routing.num_experts_per_token > routing.num_experts // num_groups * num_selected_groups
    ):
        raise CheckpointError(
            f"{fields.path}: {routing.num_experts} experts in n_group = {num_groups} groups, topk_group = {num_selected_groups} selected, "
            f"cannot give num_experts_per_tok = {routing.num_experts_per_token}"
        )
    return replace(
        routing,
        scoring=RouterScoring.SIGMOID,
        weight_sum_epsilon=1e-20 if routing.has_normalized_weights else 0.0,
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        num_expert_groups=num_groups,
        num_selected_groups=num_selected_groups,
        has_correction_bias=True,
    )
