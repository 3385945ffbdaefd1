"""Mixtures of experts that several families share."""

from dataclasses import replace

from paceline.errors import CheckpointError, shortened
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import DenseMLP, ExpertMLP, ExpertRouting, RouterScoring


def expert_layers(build: LayerBuilder, experts: ExpertMLP) -> list[DenseMLP | ExpertMLP]:
    """Return the MLPs: experts in every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    fields, step = build.fields, build.fields.size("decoder_sparse_step", 1)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"{fields.path}: mlp_only_layers = {shortened(dense)}, expected a list of layers")
    has_experts = [layer not in dense and (layer + 1) % step == 0 for layer in range(build.num_layers)]
    return [experts if chooses else build.mlp() for chooses in has_experts]


def grouped_routing(build: LayerBuilder) -> ExpertRouting:
    """Return DeepSeek-V3's routing: experts in groups, selected with a correction bias.

    Raises:
        CheckpointError: The groups do not divide the experts, or hold too few.
    """
    fields, routing = build.fields, build.routing()
    groups, chosen_groups = fields.size("n_group", 1), fields.size("topk_group", 1)
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
