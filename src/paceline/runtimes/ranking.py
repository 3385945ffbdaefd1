"""What is kept of rows of logits where the rows themselves are not wanted: the best few, log-sum-exp, the token that noise draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.runtimes.native.records import Draw

DRAW = np.dtype(Draw)
"""How the token of a row is drawn: `key` of its noise (`sampling/noise.py`), and `temperature`; 0 = it is not drawn."""

Draws: TypeAlias = NDArray[np.void]


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """What is wanted of rows of logits: a few numbers, so that the rows need not be looked at again.

    Two of the same values are two rankings: keep one for all passes that want the same, since each is recorded as a program.

    Attributes:
        columns: of a row, the first ones that count.
        count: so many of the best.
        target_ids: [columns] the id that each stands for; None = its own number.
    """

    columns: int
    count: int
    target_ids: NDArray[np.int64] | None = None


class RankedRow(NamedTuple):
    """What was found in one row, its logits divided by the temperature where it was drawn from.

    Attributes:
        log_sum: log(sum(exp(score))); not finite where the row holds NaN or +inf, or nothing else than -inf.
        drawn: the id with the largest score - log E of noise E; -1 where nothing was drawn.
        scores, token_ids: the best, largest first, lower columns first on ties; -inf and -1 where the row has no more.
    """

    log_sum: float
    drawn: int
    scores: Sequence[float]
    token_ids: Sequence[int]


def ranked_rows(records: NDArray[np.float32]) -> list[RankedRow]:
    """What `Blocks.rank` found.

    Args:
        records: [R, 2 + 2 * count] float32: `log_sum`, `drawn`, `scores`, `token_ids`; ids are the bits of an int32.
    """
    end = (records.shape[1] + 2) // 2
    numbers = zip(records.tolist(), records.view(np.int32).tolist(), strict=True)
    return [RankedRow(floats[0], ints[1], floats[2:end], ints[end:]) for floats, ints in numbers]
