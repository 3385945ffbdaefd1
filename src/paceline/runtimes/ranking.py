"""Summaries of logits rows: the top tokens, log-sum-exp and a sampled token, for callers that do not need the whole row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

DRAW = np.dtype([("key", np.uint64), ("temperature", np.float32), ("unused", np.int32)])
"""How a row's token is sampled: the `key` of its noise (`sampling/noise.py`) and the `temperature`; 0 = not sampled."""

Draws: TypeAlias = NDArray[np.void]


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """What to compute from each row of logits.

    The native runtime records a program for each object (compared by identity). Reuse one object for all passes.

    Attributes:
        columns: leading columns of a row to look at.
        count: how many top tokens to return.
        target_ids: [columns] vocabulary id of each column; None = the column's number.
    """

    columns: int
    count: int
    target_ids: NDArray[np.int64] | None = None


class RankedRow(NamedTuple):
    """The summary of one row. Scores are logits, divided by the temperature if the row was sampled.

    Attributes:
        log_sum: log(sum(exp(score))); not finite if the row has NaN, +inf, or only -inf.
        drawn: id with the largest score - log E, E exponential noise (Gumbel-max); -1 = not sampled.
        scores, token_ids: the top tokens, largest first, lower column first on ties; padded with -inf and -1.
    """

    log_sum: float
    drawn: int
    scores: Sequence[float]
    token_ids: Sequence[int]


def ranked_rows(records: NDArray[np.float32]) -> list[RankedRow]:
    """Decode the result of `Blocks.rank`.

    Args:
        records: [R, 2 + 2 * count] float32: `log_sum`, `drawn`, `scores`, `token_ids`; ids are int32 bit patterns.
    """
    end = (records.shape[1] + 2) // 2
    numbers = zip(records.tolist(), records.view(np.int32).tolist(), strict=True)
    return [RankedRow(floats[0], ints[1], floats[2:end], ints[end:]) for floats, ints in numbers]
