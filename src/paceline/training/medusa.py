"""Medusa heads: residual blocks on the target's final hidden state, with the target's own vocabulary matrix.

Head d predicts the token d + 1 places after the root from the final hidden state of the position before the root.

Source: Medusa-1 (Cai et al. 2024, arXiv:2401.10774, section 2.2). Deviations: the target's vocabulary matrix is shared and stays as it is,
as in TGI's files; it is compared over a draft vocabulary chosen from the data.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.training.batches import Batch
from paceline.training.drafter import Score, StepResult, TargetMatrices, TrainableDrafter, gather_rows, scatter_hits, summed
from paceline.training.settings import TrainSettings
from paceline.training.vocabulary import DraftVocabulary


class TrainableMedusaHeads(TrainableDrafter):
    """The heads that `drafters/medusa` runs."""

    def __init__(self, target: TargetMatrices, vocabulary: DraftVocabulary, settings: TrainSettings) -> None:
        super().__init__(target, vocabulary, settings)
        hidden = target.config.hidden_size
        self.depth = settings.num_heads
        blocks = [nn.Linear(hidden, hidden) for _ in range(settings.num_heads)]
        with torch.no_grad():  # a block begins as the identity
            for parameter in (one for block in blocks for one in block.parameters()):
                parameter.zero_()
        self.blocks = nn.ModuleList(blocks)

    def _scores(self, batch: Batch) -> list[Score]:
        targets, x = self.targets(batch), gather_rows(batch.final, batch.roots - 1).float()
        scores = []
        for head, block in enumerate(self.blocks):
            rows = (x + F.silu(block(x))) * self.target.config.logit_scale
            scores.append(self.score(rows, self.teacher, batch, targets, batch.roots + 1 + head, batch.is_root))
        return scores

    def step(self, batch: Batch, generator: torch.Generator) -> StepResult:
        return summed(self._scores(batch))

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        return scatter_hits(self._scores(batch), batch.roots.shape)

    def export(self, name: str) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        config = {"medusa_num_heads": len(self.blocks), "medusa_num_layers": 1, "base_model_name_or_path": name}
        tensors = {
            f"{head}.0.linear.{kind}": values for head, block in enumerate(self.blocks) for kind, values in block.state_dict().items()
        }
        return config, tensors
