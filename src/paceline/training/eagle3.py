"""EAGLE-3 heads, trained with training-time test.

Pair t is token t + 1 with the target's features of position t, and predicts token t + 2. In step s of the training-time test the head
reads its own output of step s - 1 at the same pair, with the token s places further. A row of step s attends to the true pairs up to its
own and to its own rows of steps 1 to s, as a chain does that is drafted after this pair.

Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840, section 3.2). Deviations: 3 steps by default; the distribution of the target is
renormalised over the draft vocabulary; start values are copied from the target's last layer.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.training.batches import Batch
from paceline.training.drafter import Score, StepResult, TargetMatrices, TrainableDrafter, gather_rows, scatter_hits, summed, token_at
from paceline.training.layers import FLATTENING, DecoderLayer, KeysValues, LayerSizes, RMSNorm, context_projection, last_layers
from paceline.training.settings import TrainSettings
from paceline.training.vocabulary import DraftVocabulary

SPARE_POSITIONS = 16  # drafted rows have positions after the end of a text


class TrainableEagle3Head(TrainableDrafter):
    """The head that `drafters/eagle` runs."""

    depth = 5

    def __init__(self, target: TargetMatrices, vocabulary: DraftVocabulary, settings: TrainSettings) -> None:
        super().__init__(target, vocabulary, settings)
        boundaries, hidden = settings.boundaries or (), target.config.hidden_size
        sizes = self.sizes = LayerSizes.of_target(target.config)
        self.fc = context_projection(len(boundaries), hidden)
        self.layer = DecoderLayer(sizes, 2 * hidden, settings.max_tokens + SPARE_POSITIONS)
        self.hidden_norm = RMSNorm(hidden, sizes.norm_eps)
        self.norm = RMSNorm(hidden, sizes.norm_eps)
        self.lm_head = nn.Parameter(self.teacher.clone())
        (tensors,) = last_layers(target.weights, target.config, 1)
        of_hidden = tensors.pop("attention_norm.weight", None)
        self.layer.start_from(tensors)
        with torch.no_grad():
            self.layer.input_layernorm.weight.fill_(1.0)
            self.norm.weight.copy_(FLATTENING * target.final_norm())
            if of_hidden is not None:
                self.hidden_norm.weight.copy_(of_hidden)

    def outputs(self, batch: Batch, depth: int) -> Iterator[Tensor]:
        """Yield the normed outputs [B, N, E] of each step, after each root."""
        attention, token_ids = self.layer.self_attn, batch.token_ids
        following = torch.cat([token_ids[:, 1:], token_ids[:, -1:]], 1)
        features = self.fc(batch.features.float()).float()
        joined = self._join(self.embedding[following], features)
        context = attention.keys_values(joined, torch.arange(token_ids.shape[1], device=joined.device).expand_as(token_ids))
        rows = batch.roots - 1  # the pair of a root has the features of the position before it
        stream, x = gather_rows(features, rows), gather_rows(joined, rows)
        own: KeysValues | None = None
        for step in range(depth):
            if step:
                x = self._join(self.embedding[token_at(batch, batch.roots + step)], stream)
                k, v = (one[:, :, None] for one in attention.keys_values(x, rows + step))
                own = (k, v) if own is None else (torch.cat([own[0], k], 2), torch.cat([own[1], v], 2))
            mixed = attention(x[:, :, None], (rows + step)[:, :, None], context, batch.roots, own)[:, :, 0]
            stream = self.layer.feed_forward(stream + mixed)
            yield self.norm(stream)

    def _join(self, embedding: Tensor, feature: Tensor) -> Tensor:
        return torch.cat([self.layer.input_layernorm(embedding), self.hidden_norm(feature)], -1)

    def _scores(self, batch: Batch, depth: int) -> list[Score]:
        targets = self.targets(batch)
        return [
            self.score(x, self.lm_head, batch, targets, batch.roots + 1 + step, batch.is_root)
            for step, x in enumerate(self.outputs(batch, depth))
        ]

    def step(self, batch: Batch, generator: torch.Generator) -> StepResult:
        return summed(self._scores(batch, self.settings.ttt_steps))

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        return scatter_hits(self._scores(batch, self.depth), batch.roots.shape)

    def export(self, name: str) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        settings, sizes = self.settings, self.sizes
        tensors = {f"layers.0.{own}": values for own, values in self.layer.state_dict().items()}
        tensors |= {"fc.weight": self.fc.weight, "layers.0.hidden_norm.weight": self.hidden_norm.weight}
        tensors |= {"norm.weight": self.norm.weight, "lm_head.weight": self.lm_head, **self.vocabulary_tables()}
        layer = {**sizes.config(), "num_hidden_layers": 1, "vocab_size": self.target.config.vocab_size}
        config = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "draft_vocab_size": len(self.vocabulary.target_ids),
            "norm_before_residual": False,
            "norm_before_fc": False,
            "norm_output": False,
            "tie_word_embeddings": False,
            "target_hidden_size": self.target.config.hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(settings.boundaries or ()),
            "transformer_layer_config": {**layer, "max_position_embeddings": settings.max_tokens},
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": self.depth, "verifier_accept_k": 1, "accept_tolerance": 0.0}
                ],
                "verifier": {"name_or_path": name, "architectures": []},
            },
        }
        return config, tensors
