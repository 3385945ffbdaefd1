"""How much an output repeats itself. Text that loops is easy to draft, so its speedup says nothing about other text."""

from collections.abc import Sequence

REPEAT_LENGTH = 8
"""Tokens of the pieces that are compared."""
MAX_REPEAT_SHARE = 0.3
"""Outputs with a larger share of repeated pieces are looping."""


def repeat_share(outputs: Sequence[Sequence[int]]) -> float:
    """Return the share of pieces that occurred before in the same output; 0 where all outputs are shorter than a piece."""
    pieces = [[tuple(ids[start : start + REPEAT_LENGTH]) for start in range(len(ids) - REPEAT_LENGTH + 1)] for ids in outputs]
    return 1.0 - sum(len(set(own)) for own in pieces) / max(1, sum(map(len, pieces))) if any(pieces) else 0.0
