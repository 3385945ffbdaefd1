"""Rejection sampling: how likely a draft token is accepted, and the residual distribution after a rejection.

Arrays of `fractions.Fraction` (dtype object) give exact results, so that tests can enumerate whole distributions.

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
    """Probabilities of the next token.

    Attributes:
        probs: [M] float64, none negative, summing to 1.
        token_ids: [M] ids, ascending; None = all V in order. Ids not listed have probability 0.
    """

    probs: ProbArray
    token_ids: Ids | None = None

    @classmethod
    def from_distribution(cls, distribution: Distribution) -> "TokenProbs":
        """Return the probabilities of a distribution, in arrays that are not views of a row."""
        return cls(distribution.probs(), distribution.token_ids)

    @property
    def end(self) -> int:
        """One more than the largest id with a listed probability."""
        return len(self.probs) if self.token_ids is None else int(self.token_ids[-1]) + 1

    def is_normalised(self) -> bool:
        """Return whether the values are probabilities and sum to 1."""
        return bool(self.probs.min() >= 0) and abs(self.probs.sum() - 1) < 1e-6  # False if a value is NaN

    def is_within(self, vocab_size: int) -> bool:
        """Return whether all ids with a probability are below `vocab_size`."""
        if self.end <= vocab_size:
            return True
        first = vocab_size if self.token_ids is None else int(np.searchsorted(self.token_ids, vocab_size))
        return not self.probs[first:].any()

    def prob(self, token_id: int) -> float:
        """Return the probability of one token."""
        index = self._index(token_id)
        return 0 if index is None else self.probs[index]

    def at_ids_of(self, other: "TokenProbs") -> ProbArray:
        """[M of other] the probabilities of the ids that `other` lists."""
        if self.token_ids is None and other.token_ids is None and len(self.probs) == len(other.probs):
            return self.probs
        dense = self.probs
        if self.token_ids is not None:
            dense = np.zeros(max(self.end, other.end), self.probs.dtype)
            dense[self.token_ids] = self.probs
        elif other.end > len(dense):
            dense = np.concatenate([dense, np.zeros(other.end - len(dense), dense.dtype)])
        return dense[: len(other.probs)] if other.token_ids is None else dense[other.token_ids]

    def without(self, token_id: int) -> "TokenProbs | None":
        """Return the distribution without `token_id`, normalised; None if no other token has a probability."""
        values = self.probs.copy()
        index = self._index(token_id)
        if index is not None:
            values[index] = 0
        total = values.sum()
        return TokenProbs(values / total, self.token_ids) if total > 0 else None

    def token_at(self, quantile: float) -> int:
        """Return the token at a quantile in (0, 1) of the cumulative distribution in the order of ids; never one of probability 0."""
        cumulative = np.cumsum(self.probs)
        index = int(np.searchsorted(cumulative, quantile * cumulative[-1], side="right"))
        return index if self.token_ids is None else int(self.token_ids[index])

    def _index(self, token_id: int) -> int | None:
        if self.token_ids is None:
            return token_id if 0 <= token_id < len(self.probs) else None
        index = int(np.searchsorted(self.token_ids, token_id))
        return index if index < len(self.probs) and self.token_ids[index] == token_id else None


def acceptance(target: TokenProbs, draft: TokenProbs, token_id: int) -> float:
    """Return target_prob / draft_prob of a draft token: its probability of acceptance, if below 1."""
    draft_prob = draft.prob(token_id)
    return target.prob(token_id) / draft_prob if draft_prob > 0 else 0  # a token that the drafter cannot draw is never accepted


def excess(target: TokenProbs, draft: TokenProbs, share: float = 1) -> ProbArray:
    """Return [M of target] max(share * target_probs - draft_probs, 0), not normalised."""
    values: Any = np.maximum(share * target.probs - draft.at_ids_of(target), 0)
    return np.asarray(values)


def residual(target: TokenProbs, weights: ProbArray) -> TokenProbs:
    """Return the distribution from which the token is drawn after a rejection.

    Args:
        weights: `excess` of the target. If target and draft differ only by rounding, all are 0 and the result is the target itself.
    """
    total = weights.sum()
    return TokenProbs(weights / total, target.token_ids) if total > 0 else target


def block_threshold(share: float, weights: ProbArray) -> float:
    """Return the probability of accepting the prefix of a block of draft tokens, up to one that is not the last.

    Args:
        share: p_i of the paper, min(1, p_(i-1) * acceptance) up to the prefix's last token.
        weights: `excess` of the target for this share, at the node after the prefix.

    Source: Sun et al. 2024, algorithm 2.
    """
    if share >= 1:
        return share
    left: float = weights.sum()
    return left / (left + 1 - share)


def draw_distinct(probs: TokenProbs, count: int, seed: int, sample_index: int, first_position: int, depth: int) -> list[int]:
    """Draw up to `count` different tokens, in order; fewer if no more have a probability.

    Args:
        seed, sample_index, first_position, depth: as in `step_uniform`.
    """
    tokens: list[int] = []
    left: TokenProbs | None = probs
    while left is not None:
        tokens.append(left.token_at(step_uniform(seed, sample_index, first_position, Purpose.DRAFT, depth, len(tokens))))
        left = left.without(tokens[-1]) if len(tokens) < count else None
    return tokens
