"""Summaries of rows of logits: the top tokens, the log-sum-exp and a sampled token. Drafters read them instead of all logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

SAMPLING_DTYPE = np.dtype([("key", np.uint64), ("temperature", np.float32), ("unused", np.int32)])
"""How a token is sampled from a row of logits: `key` seeds its Gumbel noise (`sampling/noise.py`); temperature 0 = no token is sampled."""

RowSampling: TypeAlias = NDArray[np.void]


@dataclass(frozen=True, slots=True, eq=False)
class SummaryOptions:
    """The summary to compute of each row of logits.

    Use the same object for all passes: the native runtime records the network again for each new object.

    Attributes:
        num_columns: only the first `num_columns` logits of a row are considered.
        num_top_tokens: number of tokens with the largest logits to return.
        target_ids: [num_columns] token id of each column; None = the column index is the id.
    """

    num_columns: int
    num_top_tokens: int
    target_ids: NDArray[np.int64] | None = None


class LogitsSummary(NamedTuple):
    """The summary of one row of logits. A score is a logit, divided by the temperature if a token was sampled.

    Attributes:
        log_sum_exp: log(sum(exp(score))); not finite if a logit is NaN or +inf, or all are -inf.
        sampled_id: token id with the largest score - log(E), E exponential noise (the Gumbel-max trick); -1 = no token was sampled.
        scores, token_ids: scores and ids of the top tokens, largest score first, then lowest column; padded with -inf and -1.
    """

    log_sum_exp: float
    sampled_id: int
    scores: Sequence[float]
    token_ids: Sequence[int]


def decode_summaries(records: NDArray[np.float32]) -> list[LogitsSummary]:
    """Decode the result of `Ops.summarize`.

    Args:
        records: [R, 2 + 2 * num_top_tokens] float32: `log_sum_exp`, `sampled_id`, `scores`, `token_ids`. Ids are
            int32 values in the bits of float32 elements.
    """
    end = (records.shape[1] + 2) // 2
    numbers = zip(records.tolist(), records.view(np.int32).tolist(), strict=True)
    return [LogitsSummary(floats[0], ints[1], floats[2:end], ints[end:]) for floats, ints in numbers]
