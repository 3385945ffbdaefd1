"""Summaries of rows of logits: the top tokens, log-sum-exp and a sampled token, for drafters that do not need whole rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

SAMPLING_DTYPE = np.dtype([("key", np.uint64), ("temperature", np.float32), ("unused", np.int32)])
"""How a token is sampled from a row: `key` of the noise (`sampling/noise.py`), and `temperature`; temperature 0 = no token is sampled."""

RowSampling: TypeAlias = NDArray[np.void]


@dataclass(frozen=True, slots=True, eq=False)
class SummaryOptions:
    """The summary to compute of each row of logits.

    The native runtime builds a program for each object (compared by identity), so use the same object for all passes.

    Attributes:
        columns: only the first `columns` logits of a row are considered.
        count: number of top tokens to return.
        target_ids: [columns] token id of each column; None = the column index is the id.
    """

    columns: int
    count: int
    target_ids: NDArray[np.int64] | None = None


class LogitsSummary(NamedTuple):
    """The summary of one row of logits. A score is a logit, divided by the temperature if a token was sampled.

    Attributes:
        log_sum: log(sum(exp(score))); not finite if a logit is NaN or +inf, or all are -inf.
        sampled_id: token id with the largest score - log(E), E exponential noise (the Gumbel-max trick); -1 = no token was sampled.
        scores, token_ids: scores and ids of the top tokens, largest score first, of equal ones the lower column first; padded with -inf
            and -1.
    """

    log_sum: float
    sampled_id: int
    scores: Sequence[float]
    token_ids: Sequence[int]


def decode_summaries(records: NDArray[np.float32]) -> list[LogitsSummary]:
    """Decode the result of `Ops.summarize`.

    Args:
        records: [R, 2 + 2 * count] float32: `log_sum`, `sampled_id`, `scores`, `token_ids`. Ids are stored as the bits of int32 numbers.
    """
    end = (records.shape[1] + 2) // 2
    numbers = zip(records.tolist(), records.view(np.int32).tolist(), strict=True)
    return [LogitsSummary(floats[0], ints[1], floats[2:end], ints[end:]) for floats, ints in numbers]
