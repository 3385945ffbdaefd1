"""The target's own rows as the engine saw them: watched where tokens are chosen, and compared with those of plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from paceline.runtimes.base import FloatArray
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.speculator import Speculator
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import VerifyResult


@dataclass(slots=True)
class RowWatch:
    """Rows of one request, by output position: row i is the one that output token i was chosen from.

    Attributes:
        expected: what plain decoding says; None = this is plain decoding.
        kept: positions whose rows are kept.
        checksums: of every row up to the first token that differs; empty unless wanted.
        rows: [V] float32 of the kept positions and of the first token that differs.
        diverged_at: position of that token.
    """

    expected: Sequence[int] | None = None
    kept: frozenset[int] = frozenset()
    with_checksums: bool = False
    checksums: dict[int, int] = field(default_factory=dict)
    rows: dict[int, FloatArray] = field(default_factory=dict)
    diverged_at: int | None = None

    def see(self, index: int, token: int, row: FloatArray) -> None:
        """Note the row of one position."""
        if self.diverged_at is not None:
            return
        if self.with_checksums:
            self.checksums[index] = crc32(np.ascontiguousarray(row).data)
        if self.expected is not None and index < len(self.expected) and self.expected[index] != token:
            self.diverged_at = index
        if index in self.kept or self.diverged_at == index:
            self.rows[index] = row.copy()


class WatchedSpeculator(Speculator):
    """A speculator that notes the rows of some requests; it decides as any other does."""

    watches: dict[Request, RowWatch]

    def verify(self, rows: RequestRows, tree: DraftTree) -> VerifyResult:
        result, request, logits = super().verify(rows, tree), rows.request, rows.logits
        watch = self.watches.get(request)
        if watch is not None:
            first = request.num_output_tokens
            for depth, (node, token) in enumerate(zip((0, *result.accepted_nodes), result.token_ids, strict=False)):
                watch.see(first + depth, token, logits[node])
        return result


def largest_difference(one: FloatArray, other: FloatArray) -> float:
    """Largest |difference| of two rows; equal infinities differ by 0, and what is no number differs by infinity."""
    with np.errstate(invalid="ignore"):
        apart = np.where(one == other, np.float32(0.0), np.abs(one - other))
    return float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))
