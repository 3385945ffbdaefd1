"""Formulas of rejection sampling: the probability that a draft token is accepted, and the residual distribution after a rejection.

Tests pass arrays of `fractions.Fraction` (dtype object), which give exact results.

Sources: Leviathan et al. 2023 (arXiv:2211.17192), algorithm 1; Chen et al. 2023 (arXiv:2302.01318), theorem 1; Jeon et al. 2024
(arXiv:2402.14160), section 3, for several drafts at one node without replacement; Sun et al. 2024 (arXiv:2403.10444) for whole blocks.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.draw import Distribution, ProbArray
from paceline.sampling.noise import Purpose, step_uniform

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenProbs:
    """Probabilities of the next token."""

    probs: ProbArray  # [M] float64, none negative, summing to 1
    token_ids: Ids | None = None  # [M] ids, ascending; None = all V in order; ids not listed have probability 0

    @classmethod
    def from_distribution(cls, distribution: Distribution) -> "TokenProbs":
        """Return the probabilities of a distribution. Unlike its scores, they stay valid after the next forward pass."""
        return cls(distribution.probs(), distribution.token_ids)

    @property
    def min_vocab_size(self) -> int:
        """The smallest vocabulary size that includes all listed ids."""
        return len(self.probs) if self.token_ids is None else int(self.token_ids[-1]) + 1

    def is_valid(self) -> bool:
        """Return whether `probs` are probabilities that sum to 1, and `token_ids` has one id for each, strictly ascending."""
        probs, ids = self.probs, self.token_ids
        if probs.ndim != 1 or not probs.min() >= 0 or not abs(probs.sum() - 1) < 1e-6:
            return False
        return ids is None or bool(ids.shape == probs.shape and ids.dtype.kind in "iu" and ids[0] >= 0 and (ids[1:] > ids[:-1]).all())

    def is_within(self, vocab_size: int) -> bool:
        """Return whether all ids with a probability above 0 are below `vocab_size`."""
        index = vocab_size if self.token_ids is None else int(np.searchsorted(self.token_ids, vocab_size))
        return not self.probs[index:].any()

    def prob(self, token_id: int) -> float:
        index = self._index_of(token_id)
        return 0 if index is None else self.probs[index]

    def probs_at_ids_of(self, other: "TokenProbs") -> ProbArray:
        """Return [M of other] the probabilities of the ids that `other` lists."""
        dense = self.probs
        if self.token_ids is not None or other.min_vocab_size > len(dense):
            dense = np.zeros(max(self.min_vocab_size, other.min_vocab_size), self.probs.dtype)
            dense[slice(len(self.probs)) if self.token_ids is None else self.token_ids] = self.probs
        return dense[: len(other.probs)] if other.token_ids is None else dense[other.token_ids]

    def without_token(self, token_id: int) -> "TokenProbs | None":
        """Return the distribution without `token_id`, normalised; None if no other token has a probability above 0."""
        values = self.probs.copy()
        index = self._index_of(token_id)
        if index is not None:
            values[index] = 0
        total = values.sum()
        return TokenProbs(values / total, self.token_ids) if total > 0 else None

    def token_at_quantile(self, quantile: float) -> int:
        """Return the token at a quantile in (0, 1) of the cumulative distribution over ascending ids; never a token of probability 0."""
        cumulative = np.cumsum(self.probs)
        index = int(np.searchsorted(cumulative, quantile * cumulative[-1], side="right"))
        return index if self.token_ids is None else int(self.token_ids[index])

    def _index_of(self, token_id: int) -> int | None:
        if self.token_ids is None:
            return token_id if 0 <= token_id < len(self.probs) else None
        index = int(np.searchsorted(self.token_ids, token_id))
        return index if index < len(self.probs) and self.token_ids[index] == token_id else None


def acceptance_ratio(target: TokenProbs, draft: TokenProbs, token_id: int) -> float:
    """Return target_prob / draft_prob of a draft token. Its minimum with 1 is the probability that the token is accepted."""
    draft_prob = draft.prob(token_id)
    with np.errstate(over="ignore"):  # dividing by a denormal gives infinity, whose minimum with 1 is exact
        return target.prob(token_id) / draft_prob if draft_prob > 0 else 0  # a token that the drafter cannot sample is never accepted


def excess(target: TokenProbs, draft: TokenProbs, ratio: float = 1) -> ProbArray:
    """Return [M of target] max(ratio * target_probs - draft_probs, 0), not normalised."""
    values: Any = np.maximum(ratio * target.probs - draft.probs_at_ids_of(target), 0)
    return np.asarray(values)


def residual(target: TokenProbs, weights: ProbArray) -> TokenProbs:
    """Return the distribution from which the token after a rejection is sampled.

    Args:
        weights: `excess` of the target over the draft. If both differ only by rounding, it is 0, and the target itself is returned.
    """
    total = weights.sum()
    return TokenProbs(weights / total, target.token_ids) if total > 0 else target


def block_threshold(ratio: float, weights: ProbArray) -> float:
    """Return the probability with which block verification accepts the first i draft tokens of a longer block.

    Args:
        ratio: p_i in the paper: p_0 = 1, and p_i = min(1, p_(i-1) * `acceptance_ratio` of the i-th draft token).
        weights: `excess` of target over draft with this ratio, at the node of the i-th draft token.

    Source: Sun et al. 2024, algorithm 2.
    """
    if ratio >= 1:
        return ratio
    total: float = weights.sum()
    return total / (total + 1 - ratio)


def draw_distinct(probs: TokenProbs, count: int, seed: int, sample_index: int, first_position: int, depth: int) -> list[int]:
    """Sample up to `count` different tokens without replacement; fewer if fewer have a probability above 0.

    Args:
        seed, sample_index, first_position, depth: as in `step_uniform`.
    """
    tokens: list[int] = []
    remaining: TokenProbs | None = probs
    while remaining is not None:
        tokens.append(remaining.token_at_quantile(step_uniform(seed, sample_index, first_position, Purpose.DRAFT, depth, len(tokens))))
        remaining = remaining.without_token(tokens[-1]) if len(tokens) < count else None
    return tokens
