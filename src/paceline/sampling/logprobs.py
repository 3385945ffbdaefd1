"""Log-probabilities of generated tokens and of the most probable alternatives, from the target's rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.draw import Distribution
from paceline.sampling.truncation import top_n


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability and rank in its row.

    Attributes:
        token_id: the token.
        logprob: its natural log-probability; -inf if it cannot be sampled.
        rank: 1 + the number of more probable tokens.
        top: (token id, logprob) of the most probable tokens, most probable first, lowest id first on ties. Tokens of probability 0 are
            not listed. The token itself is listed only if it is one of the most probable.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def raw_logprobs(row: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    """Return a token's log-probability in the target's row, before any processor and at temperature 1.

    Args:
        row: [V] float32 logits, never modified.
        token_id: in [0, V).
        num_top: number of most probable tokens to list.
    """
    return _token_logprobs(row, token_id, row[token_id], num_top, None)


def processed_logprobs(distribution: Distribution, token_id: int, num_top: int) -> TokenLogprobs:
    """Return a token's log-probability after all processors, temperature and truncation; arguments as for `raw_logprobs`.

    For a greedy request these are the probabilities at temperature 1, without truncation.
    """
    scores, ids = distribution.scores, distribution.token_ids
    if ids is None:
        return _token_logprobs(scores, token_id, scores[token_id], num_top, None)
    index = int(np.searchsorted(ids, token_id))
    is_listed = index < len(ids) and ids[index] == token_id
    return _token_logprobs(scores, token_id, scores[index] if is_listed else np.float32(-np.inf), num_top, ids)


def _token_logprobs(
    scores: NDArray[np.float32], token_id: int, score: np.float32, num_top: int, ids_of_scores: NDArray[np.int64] | None
) -> TokenLogprobs:
    max_score = float(scores.max())
    weights = scores.astype(np.float64)
    weights -= max_score
    log_total = float(np.log(np.exp(weights, out=weights).sum()))
    rank = 1 + int(np.count_nonzero(scores > score))
    best = top_n(scores, num_top)
    best_ids: Sequence[int] = (best if ids_of_scores is None else ids_of_scores[best]).tolist()
    top = tuple((best_id, value - max_score - log_total) for best_id, value in zip(best_ids, scores[best].tolist(), strict=True))
    return TokenLogprobs(int(token_id), float(score) - max_score - log_total, rank, top)
