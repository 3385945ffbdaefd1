"""What a pass has to do, as far as its time depends on it."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.runtimes.pass_costs import CACHED_LEN, PassKind
from paceline.speculation.request_rows import RequestRows


@dataclass(slots=True)
class PassWork:
    """What a pass reads of the cache, as `PassCosts.at` asks.

    Attributes:
        is_decoding: whether every request's root is its only known row.
        kind: as rows have adapters.
    """

    num_rows: int = 0
    num_sequences: int = 0
    num_cached: float = 0.0
    num_row_cached: float = 0.0
    is_decoding: bool = True
    kind: PassKind = PassKind.PLAIN

    @classmethod
    def of(cls, batch: Sequence[RequestRows], *, with_guesses: bool) -> "PassWork":
        work = cls()
        for rows in batch:
            count = rows.num_known + (rows.num_guesses if with_guesses else 0)
            cached = cached_rows(rows)
            work.is_decoding = work.is_decoding and rows.is_decoding
            work.num_rows += count
            work.num_sequences += 1
            work.num_cached += cached
            work.num_row_cached += count * cached
            if rows.request.adapter_number > 0 and work.kind is not PassKind.SCALING:
                work.kind = PassKind.SCALING if rows.request.takes_scaling_passes else PassKind.ADAPTERS
        return work


def cached_rows(rows: RequestRows) -> float:
    """Cached rows of a request beyond those behind which passes were timed."""
    return max(0.0, float(rows.request.sequence.committed_len - CACHED_LEN))
