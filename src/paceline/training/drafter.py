"""What all trained drafters share: the target's matrices, the loss of rows, and the estimate of accepted tokens."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from paceline.models.config import ModelConfig
from paceline.models.weights import Weights, as_float32
from paceline.training.batches import Batch
from paceline.training.losses import Targets, vocabulary_loss
from paceline.training.settings import TrainSettings
from paceline.training.vocabulary import DraftVocabulary

DEPTH_WEIGHT = 0.8
"""Each further token of a draft weighs so much less in the loss (EAGLE-3; DFlash's decay is close to it)."""


@dataclass(frozen=True, slots=True)
class TargetMatrices:
    """The target as a drafter's trainer reads it, through our own loaders.

    Attributes:
        weights: by our names; quantised ones are dequantised.
        mask_token_id: an id that is never drafted after, for masked rows.
    """

    config: ModelConfig
    weights: Weights
    mask_token_id: int = 0

    def embedding(self) -> Tensor:
        """Return the embedding table [V, E] float32, not scaled."""
        return torch.from_numpy(np.array(as_float32(self.weights["embedding.weight"])))

    def lm_head(self, target_ids: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
        """Return rows [len(target_ids), E] float32 of the vocabulary matrix."""
        name = "embedding.weight" if self.config.tied_embeddings else "lm_head.weight"
        return torch.from_numpy(np.array(as_float32(self.weights[name], target_ids.astype(np.int32))))

    def final_norm(self) -> Tensor:
        """Return the weight [E] of the norm before the vocabulary matrix."""
        return torch.from_numpy(np.array(as_float32(self.weights["final_norm.weight"])))


class Score(NamedTuple):
    """Training result at one depth: weighted loss, the rows [R] of the batch with a label, and whether each label was predicted."""

    loss: Tensor
    rows: Tensor
    is_hit: Tensor


class StepResult(NamedTuple):
    """Training result of one batch: the loss, and for each depth the number of correct rows and of all rows."""

    loss: Tensor
    num_hits: list[int]
    num_rows: list[int]


class TrainableDrafter(nn.Module, ABC):
    """A drafter in training.

    Args:
        target: the target's matrices.
        vocabulary: ids that can be drafted.

    Attributes:
        depth: tokens of the chain that is evaluated.
        dtype: of the products of the loss.
    """

    depth: int
    embedding: Tensor
    teacher: Tensor

    def __init__(self, target: TargetMatrices, vocabulary: DraftVocabulary, settings: TrainSettings) -> None:
        super().__init__()
        self.target, self.vocabulary, self.settings = target, vocabulary, settings
        self.dtype = torch.bfloat16
        self.register_buffer("embedding", target.embedding(), persistent=False)
        self.register_buffer("teacher", target.lm_head(vocabulary.target_ids), persistent=False)

    @classmethod
    def check_target(cls, target: ModelConfig, settings: TrainSettings) -> None:
        """Check that a drafter can be made for a target.

        Raises:
            ConfigError: it cannot.
        """

    @abstractmethod
    def step(self, batch: Batch, generator: torch.Generator) -> StepResult:
        """Return the loss of a batch.

        Args:
            generator: for random choices.
        """

    @abstractmethod
    def hits(self, batch: Batch) -> Tensor:
        """Return [B, N, depth]: whether each token of the draft after each root is the text's, given that the tokens before it are."""

    @abstractmethod
    def export(self, name: str) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """Return the config.json and the tensors in the publishers' layout; `name` is the target's."""

    def targets(self, batch: Batch) -> Targets:
        """Return the labels of a batch, with the target's distributions if the loss is soft."""
        if self.settings.loss == "hard":
            return Targets(batch.draft_ids, None)
        sequence, position = batch.label_rows.unbind(1)
        with torch.no_grad():
            logits = (batch.final[sequence, position - 1].to(self.dtype) @ self.teacher.to(self.dtype).T).float()
            logits = logits * self.target.config.logit_scale
            if (cap := self.target.config.logit_soft_cap) is not None:
                logits = cap * torch.tanh(logits / cap)
            return Targets(batch.draft_ids, logits.softmax(-1).to(self.dtype))

    def score(self, x: Tensor, matrix: Tensor, batch: Batch, targets: Targets, positions: Tensor, is_row: Tensor) -> Score:
        """Score rows that predict the tokens at `positions`; the loss is their sum.

        Args:
            x: [..., W] rows.
            positions: [B, ...] of the tokens.
            is_row: [B, ...] False for padding.
        """
        labels = batch.labels_at(positions)
        rows = torch.nonzero((is_row & (labels >= 0)).flatten())[:, 0]
        index = labels.flatten()[rows]
        known = batch.draft_ids[index]
        loss, best = vocabulary_loss(x.flatten(0, -2)[rows], matrix, targets, index, (known >= 0).float(), self.dtype)
        return Score(loss, rows, best == known)

    def num_parameters(self) -> int:
        """Return the number of trained values."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def vocabulary_tables(self) -> dict[str, Tensor]:
        """Return `d2t`, what to add to a draft id, and `t2d`, which of the target's ids can be drafted."""
        ids = torch.from_numpy(self.vocabulary.target_ids)
        marked = torch.zeros(self.target.config.vocab_size, dtype=torch.bool)
        marked[ids] = True
        return {"d2t": ids - torch.arange(len(ids)), "t2d": marked}


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows [B, N, W] of x [B, T, W]."""
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


def token_at(batch: Batch, positions: Tensor) -> Tensor:
    """Return the tokens at positions [B, ...]; those after the end are the last ones."""
    flat = positions.clamp(max=batch.token_ids.shape[1] - 1).flatten(1)
    return batch.token_ids.gather(1, flat).view_as(positions)


def scatter_hits(scores: Sequence[Score], shape: torch.Size) -> Tensor:
    """Return [B, N, depth] from the scores of each depth; rows without a label count as missed."""
    found = []
    for score in scores:
        flat = torch.zeros(shape.numel(), dtype=torch.bool, device=score.rows.device)
        flat[score.rows] = score.is_hit
        found.append(flat.view(shape))
    return torch.stack(found, -1)


def summed(scores: Sequence[Score]) -> StepResult:
    """Return the mean loss of a draft's depths, weighted by depth."""
    weights = [DEPTH_WEIGHT**depth for depth in range(len(scores))]
    parts = [weight * score.loss / max(1, len(score.rows)) for weight, score in zip(weights, scores, strict=True)]
    loss = torch.stack(parts).sum() / sum(weights)
    return StepResult(loss, [int(score.is_hit.sum()) for score in scores], [len(score.rows) for score in scores])
