"""The arithmetic of rejection sampling: how likely a draft is kept, and the residual distribution where it is not.

Nothing is rounded on purpose: arrays of `fractions.Fraction` (dtype object) give exact results, so that a test can enumerate whole
distributions.

Sources: Leviathan et al. 2023 (arXiv:2211.17192), algorithm 1; Chen et al. 2023 (arXiv:2302.01318), theorem 1; for several drafts at
one place without replacement Jeon et al. 2024 (arXiv:2402.14160), section 3; for whole blocks Sun et al. 2024 (arXiv:2403.10444).
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
        values: [M] float64, none negative, summing to 1.
        token_ids: [M] ids, ascending; None = all V in order. Ids not listed have probability 0.
    """

    values: ProbArray
    token_ids: Ids | None = None

    @classmethod
    def of(cls, distribution: Distribution) -> "TokenProbs":
        """The probabilities of a distribution that is drawn from; arrays of their own."""
        return cls(distribution.probs(), distribution.token_ids)

    @property
    def end(self) -> int:
        """One more than the largest id that is listed."""
        return len(self.values) if self.token_ids is None else int(self.token_ids[-1]) + 1

    def is_normalised(self) -> bool:
        """Whether these are probabilities, and sum to 1."""
        return bool(self.values.min() >= 0) and abs(self.values.sum() - 1) < 1e-6  # NaN is neither

    def is_within(self, vocab_size: int) -> bool:
        """Whether all probability is at ids below `vocab_size`."""
        if self.end <= vocab_size:
            return True
        first = vocab_size if self.token_ids is None else int(np.searchsorted(self.token_ids, vocab_size))
        return not self.values[first:].any()

    def prob(self, token_id: int) -> float:
        """The probability of one token."""
        index = self._index(token_id)
        return 0 if index is None else self.values[index]

    def over(self, other: "TokenProbs") -> ProbArray:
        """[M of other] these probabilities at the ids that `other` lists."""
        if self.token_ids is None and other.token_ids is None and len(self.values) == len(other.values):
            return self.values
        dense = self.values
        if self.token_ids is not None:
            dense = np.zeros(max(self.end, other.end), self.values.dtype)
            dense[self.token_ids] = self.values
        elif other.end > len(dense):
            dense = np.concatenate([dense, np.zeros(other.end - len(dense), dense.dtype)])
        return dense[: len(other.values)] if other.token_ids is None else dense[other.token_ids]

    def without(self, token_id: int) -> "TokenProbs | None":
        """The distribution of a second draw that may not repeat `token_id`; None where nothing is left to draw."""
        values = self.values.copy()
        index = self._index(token_id)
        if index is not None:
            values[index] = 0
        total = values.sum()
        return TokenProbs(values / total, self.token_ids) if total > 0 else None

    def pick(self, uniform: float) -> int:
        """The token at quantile `uniform` in (0, 1), tokens in the order of ids; never one of probability 0."""
        reached = np.cumsum(self.values)
        index = int(np.searchsorted(reached, uniform * reached[-1], side="right"))
        return index if self.token_ids is None else int(self.token_ids[index])

    def _index(self, token_id: int) -> int | None:
        if self.token_ids is None:
            return token_id if 0 <= token_id < len(self.values) else None
        index = int(np.searchsorted(self.token_ids, token_id))
        return index if index < len(self.values) and self.token_ids[index] == token_id else None


def acceptance(target: TokenProbs, draft: TokenProbs, token_id: int) -> float:
    """target_prob / draft_prob of a draft: it is kept at least that often, and always from 1 on."""
    draft_prob = draft.prob(token_id)
    return target.prob(token_id) / draft_prob if draft_prob > 0 else 0  # one that could not be drawn is not kept


def excess(target: TokenProbs, draft: TokenProbs, share: float = 1) -> ProbArray:
    """[M of target] max(share * target_probs - draft_probs, 0), not normalised."""
    values: Any = np.maximum(share * target.values - draft.over(target), 0)
    return np.asarray(values)


def residual(target: TokenProbs, weights: ProbArray) -> TokenProbs:
    """The distribution of the token after rejected drafts.

    Args:
        weights: `excess` of the target. All 0 if target and draft differ only by rounding: then the target's own stays.
    """
    total = weights.sum()
    return TokenProbs(weights / total, target.token_ids) if total > 0 else target


def block_threshold(share: float, weights: ProbArray) -> float:
    """The probability with which a block of drafts may be accepted up to a draft that is not its last one.

    Args:
        share: of the target's probability that the drafts so far account for, min(1, share before * acceptance).
        weights: `excess` behind them for that share.

    Source: Sun et al. 2024, algorithm 2.
    """
    if share >= 1:
        return share
    left: float = weights.sum()
    return left / (left + 1 - share)


def draw_distinct(probs: TokenProbs, count: int, seed: int, sample_index: int, first_position: int, depth: int) -> list[int]:
    """Up to `count` different tokens in the order they were drawn, fewer where no more have a probability.

    Args:
        seed, sample_index, first_position, depth: the key of the `draft` noise, as in `step_uniform`.
    """
    tokens: list[int] = []
    left: TokenProbs | None = probs
    while left is not None:
        tokens.append(left.pick(step_uniform(seed, sample_index, first_position, Purpose.DRAFT, depth, len(tokens))))
        left = left.without(tokens[-1]) if len(tokens) < count else None
    return tokens
