"""How much an output repeats itself. Text that loops is easy to draft, so its speedup says nothing about other text."""

from collections.abc import Sequence

NGRAM_TOKENS = 8
"""Tokens of the n-grams that are compared."""
MAX_REPEAT_SHARE = 0.3
"""Outputs with a larger share of repeated n-grams are looping."""


def repeat_share(outputs: Sequence[Sequence[int]]) -> float:
    """Return the share of n-grams that occurred before in the same output; 0 if all outputs are shorter than one n-gram."""
    ngrams = [[tuple(ids[start : start + NGRAM_TOKENS]) for start in range(len(ids) - NGRAM_TOKENS + 1)] for ids in outputs]
    return 1.0 - sum(len(set(own)) for own in ngrams) / max(1, sum(map(len, ngrams))) if any(ngrams) else 0.0
