"""The definition of a draw: the token of a position is argmax_v (score_v - log E_v) with E_v the noise of that position and id."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.noise import BitsArray, Purpose, exponential, noise_bits

ScoreArray = NDArray[np.float32]
ProbArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distribution:
    """What is left of a row after all processors.

    Attributes:
        scores: [M] float32 log-probabilities up to a constant, already divided by the temperature. May be a view of the
            row they were made from, so they live until the runtime's next pass.
        token_ids: [M] ids, ascending; None = all V in order. Ids not listed have probability 0.
        greedy: whether the token is the argmax instead of a draw.
    """

    scores: ScoreArray
    token_ids: NDArray[np.int64] | None
    greedy: bool

    def argmax(self) -> int:
        """Return the most probable token, lowest id on ties."""
        best = int(self.scores.argmax())
        return best if self.token_ids is None else int(self.token_ids[best])

    def log_probs(self) -> ProbArray:
        """[M] float64 normalised log-probabilities (of the unscaled logits where `greedy`)."""
        shifted = self.scores.astype(np.float64) - self.scores.max()
        return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float64)

    def probs(self) -> ProbArray:
        """[M] float64 probabilities, summing to 1."""
        return np.exp(self.log_probs())


def draw(distribution: Distribution, seed: int, sample_index: int, position: int) -> int:
    """Draw the token of one position, or take the plain argmax of a greedy distribution.

    Args:
        seed: the request's, in [0, 2**64).
        sample_index: which of the request's n samples.
        position: index in prompt + output of the token being drawn.

    Returns:
        a vocabulary id; a pure function of the arguments, lowest id on ties.
    """
    if distribution.greedy:
        return distribution.argmax()
    scores, ids = distribution.scores, distribution.token_ids
    bits = noise_bits(seed, sample_index, position, Purpose.TOKEN, len(scores) if ids is None else ids)
    best = int(gumbel_scores(scores, bits).argmax())
    return best if ids is None else int(ids[best])


def gumbel_scores(scores: NDArray[np.floating], bits: BitsArray) -> NDArray[np.float64]:
    """score - log E in float64."""
    return np.asarray(scores - np.log(exponential(bits)), np.float64)
