"""Which experts each row chooses, and their weights."""

from dataclasses import dataclass

import torch

from paceline.models.layers import Routing, Scoring


@dataclass(frozen=True, slots=True)
class Choice:
    """`experts` [T, chosen] int64 and their `weights` [T, chosen] float32."""

    experts: torch.Tensor
    weights: torch.Tensor


def choose_experts(logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None, scales: torch.Tensor | None) -> Choice:
    """The choice of every row.

    Args:
        logits: [T, experts].
        correction, scales: [experts] float32 where the routing has them.
    """
    scores = logits.float().softmax(dim=-1) if routing.scoring is Scoring.SOFTMAX else logits.float().sigmoid()
    compared = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        compared = _without_other_groups(compared, routing)
    experts = compared.sort(dim=-1, descending=True, stable=True).indices[:, : routing.num_chosen]  # the first of equal ones
    weights = scores.gather(1, experts)
    if routing.is_normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + routing.least)
    weights = weights * routing.factor
    return Choice(experts, weights if scales is None else weights * scales[experts])


def _without_other_groups(compared: torch.Tensor, routing: Routing) -> torch.Tensor:
    groups = compared.reshape(len(compared), routing.num_groups, -1)
    sums = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
    best = sums.sort(dim=-1, descending=True, stable=True).indices[:, : routing.chosen_groups]
    is_other = torch.ones_like(sums, dtype=torch.bool).scatter(1, best, value=False)
    left: torch.Tensor = groups.masked_fill(is_other[..., None], -torch.inf).flatten(-2)
    return left
