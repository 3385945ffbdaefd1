"""Block drafters: DFlash, and DSpark with its bias and confidence.

A block is an anchor and mask tokens. Its rows attend to keys and values of all committed positions before the anchor, made of the target's
features, and to one another. Blocks are trained after random anchors. DSpark's row j predicts the token after its own position, DFlash's
the token at it. DSpark adds a bias of the token before, and predicts whether each token will be accepted.

Sources: DFlash (z-lab), DSpark (deepseek-ai/DeepSpec). Deviations: start values are copied from the target's last layers; drafts come from
a vocabulary chosen from the data; rows weigh 0.8^j; the confidence is trained on rows before which all were right.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.training.batches import Batch
from paceline.training.drafter import Score, StepResult, TargetMatrices, TrainableDrafter, scatter_hits, summed, token_at
from paceline.training.layers import FLATTENING, DecoderLayer, LayerSizes, RMSNorm, context_projection, last_layers
from paceline.training.settings import TrainSettings
from paceline.training.vocabulary import DraftVocabulary

ANCHOR_SHARE = 0.4
"""Share of a batch's positions that are anchors."""


class TrainableBlockDrafter(TrainableDrafter):
    """The drafter that `drafters/block` runs."""

    def __init__(self, target: TargetMatrices, vocabulary: DraftVocabulary, settings: TrainSettings) -> None:
        super().__init__(target, vocabulary, settings)
        hidden, count = target.config.hidden_size, settings.num_layers or 2
        sizes = self.sizes = LayerSizes.of_target(target.config)
        self.is_dspark = settings.drafter == "dspark"
        self.depth = settings.block_size if self.is_dspark else settings.block_size - 1
        self.fc = context_projection(len(settings.boundaries or ()), hidden)
        self.hidden_norm, self.norm = RMSNorm(hidden, sizes.norm_eps), RMSNorm(hidden, sizes.norm_eps)
        layers = [DecoderLayer(sizes, hidden, settings.max_tokens + settings.block_size) for _ in range(count)]
        copied = last_layers(target.weights, target.config, count)
        for layer, tensors in zip(layers, copied, strict=True):
            layer.start_from(tensors)
        self.layers = nn.ModuleList(layers)
        self.lm_head = nn.Parameter(self.teacher.clone())
        if self.is_dspark:
            rank = settings.markov_rank
            self.markov_w1 = nn.Parameter(torch.randn(target.config.vocab_size, rank) * 0.02)
            self.markov_w2 = nn.Parameter(torch.zeros(len(vocabulary.target_ids), rank))
            self.confidence = nn.Linear(hidden + rank, 1)
        with torch.no_grad():
            self.norm.weight.copy_(FLATTENING * target.final_norm())
            if "attention_norm.weight" in copied[-1]:
                self.hidden_norm.weight.copy_(copied[-1]["attention_norm.weight"])

    def outputs(self, batch: Batch, anchors: Tensor) -> Tensor:
        """Return the normed rows [B, N, block, E] of the blocks at `anchors` [B, N]."""
        size = self.settings.block_size
        context = self.hidden_norm(self.fc(batch.features.float()))
        places = torch.arange(batch.token_ids.shape[1], device=context.device).expand_as(batch.token_ids)
        ids = torch.full((*anchors.shape, size), self.target.mask_token_id, device=context.device)
        ids[..., 0] = token_at(batch, anchors)
        x = self.embedding[ids] * self.target.config.embedding_scale
        positions = anchors[..., None] + torch.arange(size, device=x.device)
        for layer in (one for one in self.layers if isinstance(one, DecoderLayer)):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            own = attention.keys_values(normed, positions)
            x = x + attention(normed, positions, attention.keys_values(context, places), anchors, own)
            x = layer.feed_forward(x)
        normed_rows: Tensor = self.norm(x)
        return normed_rows if self.is_dspark else normed_rows[..., 1:, :]

    def _scores(self, batch: Batch, anchors: Tensor, is_anchor: Tensor) -> tuple[list[Score], list[Tensor]]:
        """Return the score of each row of the blocks, and DSpark's confidences [B * N] of it."""
        targets, rows = self.targets(batch), self.outputs(batch, anchors)
        matrix = torch.cat([self.lm_head, self.markov_w2], 1) if self.is_dspark else self.lm_head
        scores, confidences = [], []
        for depth in range(self.depth):
            x = rows[..., depth, :]
            if self.is_dspark:
                bias = self.markov_w1[token_at(batch, anchors + depth)]
                x = torch.cat([x, bias.to(x.dtype)], -1)
                confidences.append(self.confidence(x.detach())[..., 0].float().flatten())
            scores.append(self.score(x, matrix, batch, targets, anchors + 1 + depth, is_anchor))
        return scores, confidences

    def step(self, batch: Batch, generator: torch.Generator) -> StepResult:
        anchors, is_anchor = choose_anchors(batch, generator)
        scores, confidences = self._scores(batch, anchors, is_anchor)
        result = summed(scores)
        if not confidences:
            return result
        return result._replace(loss=result.loss + confidence_loss(scores, confidences, anchors.shape))

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        scores, _ = self._scores(batch, batch.roots, batch.is_root)
        return scatter_hits(scores, batch.roots.shape)

    def export(self, name: str) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        settings = self.settings
        tensors = {f"layers.{own}": values for own, values in self.layers.state_dict().items()}
        tensors |= {"fc.weight": self.fc.weight, "hidden_norm.weight": self.hidden_norm.weight, "norm.weight": self.norm.weight}
        tensors |= {"lm_head.weight": self.lm_head, **self.vocabulary_tables()}
        ids = {
            "mask_token_id": self.target.mask_token_id,
            "target_layer_ids": [boundary - 1 for boundary in settings.boundaries or ()],  # outputs of layers
        }
        config = {
            "architectures": ["DSparkDraftModel" if self.is_dspark else "DFlashDraftModel"],
            **self.sizes.config(),
            "num_hidden_layers": len(self.layers),
            "num_target_layers": self.target.config.num_layers,
            "vocab_size": self.target.config.vocab_size,
            "draft_vocab_size": len(self.vocabulary.target_ids),
            "max_position_embeddings": settings.max_tokens,
            "block_size": settings.block_size,
            "is_causal": False,
            "input_embedding_scale": self.target.config.embedding_scale,
            "sample_from_anchor": self.is_dspark,
            "base_model_name_or_path": name,
        }
        if not self.is_dspark:
            return {**config, "dflash_config": ids}, tensors
        tensors |= {"markov_head.markov_w1.weight": self.markov_w1, "markov_head.markov_w2.weight": self.markov_w2}
        tensors |= {"confidence_head.proj.weight": self.confidence.weight, "confidence_head.proj.bias": self.confidence.bias}
        markov = {
            "markov_rank": settings.markov_rank, "markov_head_type": "vanilla", "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }  # fmt: skip
        return {**config, **ids, **markov}, tensors


def choose_anchors(batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random roots [B, A] of each sequence, ascending, and which of them are no padding."""
    count = max(1, round(ANCHOR_SHARE * batch.roots.shape[1]))
    draws = torch.rand(batch.roots.shape, generator=generator).to(batch.roots.device).masked_fill(~batch.is_root, -1.0)
    chosen = draws.topk(count, dim=1).indices.sort(1).values
    return batch.roots.gather(1, chosen), batch.is_root.gather(1, chosen)


def confidence_loss(scores: list[Score], confidences: list[Tensor], shape: torch.Size) -> Tensor:
    """Return the mean binary cross-entropy of the confidences, over rows before which all rows of the block are right."""
    hits = scatter_hits(scores, shape).flatten(0, 1)
    total, count = hits.new_zeros((), dtype=torch.float32), 0
    for depth, (score, logits) in enumerate(zip(scores, confidences, strict=True)):
        rows = score.rows[hits[score.rows, :depth].all(-1)]
        total = total + F.binary_cross_entropy_with_logits(logits[rows], hits[rows, depth].float(), reduction="sum")
        count += len(rows)
    return total / max(1, count)
