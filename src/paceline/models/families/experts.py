"""MLPs with experts, and their routing, as several families have them."""

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
    """Return experts of width `moe_intermediate_size`, and `num_shared` shared ones, which are one MLP of their total width."""
    expert = builder.mlp(width_field="moe_intermediate_size")
    shared = replace(expert, intermediate_size=int(expert.intermediate_size * num_shared)) if num_shared else None
    return ExpertMLP(routing=routing, expert=expert, shared=shared)


def experts_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of experts whose width is `intermediate_size`."""
    experts = fields.read_experts(width=config["intermediate_size"])
    return {**experts, "intermediate_size": experts["moe_intermediate_size"]}


def grouped_experts_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `grouped_topk_routing`, of dense first layers, and the number of layers without the MTP modules."""
    return {
        "num_hidden_layers": fields.num_layers_without_mtp(config["num_hidden_layers"]),
        "first_k_dense_replace": fields.architecture_value("leading_dense_block_count") or 0,
        "n_shared_experts": fields.architecture_value("expert_shared_count") or 0,
        "n_group": fields.count("expert_group_count", 1),
        "topk_group": fields.count("expert_group_used_count", 1),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
    }


def grouped_topk_routing(builder: LayerBuilder) -> ExpertRouting:
    """Return the routing of DeepSeek-V3: only experts of the best groups are candidates, selected with a correction bias.

    Raises:
        CheckpointError: The number of experts is no multiple of that of groups, or there are too few candidates.
    """
    fields, routing = builder.fields, builder.routing()
    groups, chosen_groups = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if (
        routing.num_experts % groups
        or chosen_groups > groups
        or routing.num_experts_per_token > routing.num_experts // groups * chosen_groups
    ):
        raise CheckpointError(
            f"{fields.path}: {routing.num_experts} experts in n_group = {groups} groups, of which topk_group = {chosen_groups} are chosen, "
            f"cannot give num_experts_per_tok = {routing.num_experts_per_token}"
        )
    return replace(
        routing,
        scoring=RouterScoring.SIGMOID,
        epsilon=1e-20 if routing.is_normalized else 0.0,
        factor=fields.number("routed_scaling_factor", 1.0),
        num_groups=groups,
        chosen_groups=chosen_groups,
        has_correction_bias=True,
    )
