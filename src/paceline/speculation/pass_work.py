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
        num_rows, num_cached, num_row_cached, is_decoding, kind = 0, 0.0, 0.0, True, PassKind.PLAIN
        for rows in batch:
            count, cached = rows.num_known, cached_rows(rows)
            if count != 1 or rows.tree is None:
                is_decoding = False
            elif with_guesses:
                count = len(rows.tree.token_ids)
            num_rows += count
            num_cached += cached
            num_row_cached += count * cached
            if rows.request.adapter_number > 0 and kind is not PassKind.SCALING:
                kind = PassKind.SCALING if rows.request.takes_scaling_passes else PassKind.ADAPTERS
        return cls(num_rows, len(batch), num_cached, num_row_cached, is_decoding, kind)


def cached_rows(rows: RequestRows) -> float:
    """Cached rows of a request beyond those behind which passes were timed."""
    num_more = rows.request.sequence.committed_len - CACHED_LEN
    return float(num_more) if num_more > 0 else 0.0
