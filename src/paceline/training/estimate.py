"""Estimates a drafter's acceptance on recorded texts: greedy chains after each token, walked as decoding would walk them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.training.batches import epoch_batches, make_batch
from paceline.training.drafter import TrainableDrafter
from paceline.training.shards import SequenceData


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated acceptance on a set of texts.

    Attributes:
        mean_acceptance_length: tokens of a step, as `SpeculationStats` counts them: the prompt's last pass is a step.
        accuracy: share of first draft tokens that are right, after every token.
        num_tokens: of the answers.
    """

    mean_acceptance_length: float
    accuracy: float
    num_tokens: int


def count_steps(hits: NDArray[np.bool_]) -> tuple[int, int]:
    """Return the steps and tokens of a text.

    Args:
        hits: [N, depth] whether each draft token is right; row i drafts after the token before the i-th of the answer.
    """
    runs = np.cumprod(hits, axis=1).sum(1)
    steps = position = 1  # the prompt's last pass emits the first token
    while position < len(hits):
        position += int(runs[position]) + 1
        steps += 1
    return steps, len(hits)


@torch.no_grad()
def estimate(drafter: TrainableDrafter, data: SequenceData, device: str, batch_tokens: int) -> dict[str, Estimate]:
    """Return the estimate for the texts of each source, and for all of them as "all"."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    hidden_size = drafter.target.config.hidden_size
    for indices in epoch_batches(data, 0, 0, max(1, batch_tokens // 2)):
        batch = make_batch(data, indices, drafter.vocabulary, hidden_size, device)
        with torch.autocast(device, torch.bfloat16, enabled=drafter.dtype is torch.bfloat16):
            hits = drafter.hits(batch)
        for row, index in enumerate(indices):
            own = hits[row][batch.is_root[row]].cpu().numpy()
            if len(own):
                found.setdefault(data.sources[index], []).append((*count_steps(own), int(own[:, 0].sum())))
    everything = [one for parts in found.values() for one in parts]
    return {name: _summary(parts) for name, parts in (*found.items(), ("all", everything)) if parts}


def _summary(parts: Sequence[tuple[int, int, int]]) -> Estimate:
    steps, tokens, right = (sum(column) for column in zip(*parts, strict=True))
    return Estimate(tokens / steps, right / tokens, tokens)
