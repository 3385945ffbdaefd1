"""Sampling by the Gumbel-max trick: the token of a position is argmax_v (score_v - log E_v), where E_v is exponential noise of token v."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.noise import BitsArray, Purpose, exponential, noise_bits

ScoreArray = NDArray[np.float32]
ProbArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of the next token after all processors.

    Attributes:
        scores: [M] float32 log-probabilities up to a constant, divided by the temperature. They may be a view of the logits, which the next
            forward pass overwrites.
        token_ids: [M] ids, ascending; None = all V in order. Ids not listed have probability 0.
        greedy: whether the argmax is taken instead of a sample.
    """

    scores: ScoreArray
    token_ids: NDArray[np.int64] | None
    greedy: bool

    def argmax(self) -> int:
        """Return the most probable token, lowest id on ties."""
        best = int(self.scores.argmax())
        return best if self.token_ids is None else int(self.token_ids[best])

    def log_probs(self) -> ProbArray:
        """Return [M] float64 normalised log-probabilities. If `greedy`, they are those at temperature 1."""
        shifted = self.scores.astype(np.float64) - self.scores.max()
        return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float64)

    def probs(self) -> ProbArray:
        """Return [M] float64 probabilities, summing to 1."""
        return np.exp(self.log_probs())


def draw(distribution: Distribution, seed: int, sample_index: int, position: int) -> int:
    """Sample the token of one position; return the argmax if the distribution is greedy.

    Args:
        seed: seed of the request, in [0, 2**64).
        sample_index: which of the request's n samples.
        position: index of the token in prompt + output.

    Returns:
        a vocabulary id, lowest on ties; a pure function of the arguments.
    """
    if distribution.greedy:
        return distribution.argmax()
    scores, ids = distribution.scores, distribution.token_ids
    bits = noise_bits(seed, sample_index, position, Purpose.TOKEN, len(scores) if ids is None else ids)
    best = int(gumbel_scores(scores, bits).argmax())
    return best if ids is None else int(ids[best])


def gumbel_scores(scores: NDArray[np.floating], bits: BitsArray) -> NDArray[np.float64]:
    """Return score - log E in float64, with exponential noise E from 32 random bits per id. The token with the largest value is sampled."""
    return np.asarray(scores - np.log(exponential(bits)), np.float64)
