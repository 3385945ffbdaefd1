"""How long readers wait between two steps that bring them tokens."""

from bisect import bisect_left
from dataclasses import dataclass, field

BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper ends of the ranges that are counted; a last one has none."""


@dataclass(slots=True)
class TokenGaps:
    """Counts of gaps by their length, and their sum.

    A step may bring several tokens; they have one gap in front of them, which is what a reader sees.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, gap_s: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS_S, gap_s)] += 1
        self.total_s += gap_s
