"""Log-probabilities of chosen tokens and of the best alternatives, from the target's own row."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.draw import Distribution
from paceline.sampling.top_n import top_n


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability and rank in its row.

    Attributes:
        token_id: the token.
        logprob: its natural log-probability; -inf where it cannot be drawn.
        rank: 1 + how many tokens are strictly more probable.
        top: (token id, logprob) of the most probable tokens, best first, lowest id first on ties; fewer than asked for where the
            others have probability 0. Holds the token itself only if it is among them.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def raw_logprobs(row: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    """A token's log-probability in the target's own row, before any processor and at temperature 1.

    Args:
        row: [V] float32 logits, never modified.
        token_id: in [0, V).
        num_top: how many of the best tokens to list; 0 = none.
    """
    return _token_logprobs(row, token_id, row[token_id], num_top, None)


def processed_logprobs(distribution: Distribution, token_id: int, num_top: int) -> TokenLogprobs:
    """A token's log-probability as it is drawn: after all processors, temperature and truncation; arguments as for `raw_logprobs`.

    A greedy distribution counts with temperature 1 and without truncation, because it never gets that far.
    """
    scores, ids = distribution.scores, distribution.token_ids
    if ids is None:
        return _token_logprobs(scores, token_id, scores[token_id], num_top, None)
    index = int(np.searchsorted(ids, token_id))
    is_listed = index < len(ids) and ids[index] == token_id
    return _token_logprobs(scores, token_id, scores[index] if is_listed else np.float32(-np.inf), num_top, ids)


def _token_logprobs(
    scores: NDArray[np.float32], token_id: int, score: np.float32, num_top: int, token_ids: NDArray[np.int64] | None
) -> TokenLogprobs:
    """Of scores [M] whose ids are `token_ids`, None = all in order."""
    peak = float(scores.max())
    log_total = _log_total(scores, peak)
    rank = 1 + int(np.count_nonzero(scores > score))
    best = top_n(scores, num_top)
    best_ids: Sequence[int] = (best if token_ids is None else token_ids[best]).tolist()
    top = tuple((best_id, value - peak - log_total) for best_id, value in zip(best_ids, scores[best].tolist(), strict=True))
    return TokenLogprobs(int(token_id), float(score) - peak - log_total, rank, top)


def _log_total(scores: NDArray[np.float32], peak: float) -> float:
    """log of the sum of exp(score - peak), in float64."""
    weights = scores.astype(np.float64)
    weights -= peak
    np.exp(weights, out=weights)
    return float(np.log(weights.sum()))
