"""How far the logits of one and the same position are apart between passes of one row and passes shaped like verification."""

from collections.abc import Sequence
from itertools import islice

import numpy as np

from paceline.kv_cache.paged import CachedSequence, KVCache
from paceline.proof.exactness.rows import largest_difference
from paceline.runtimes.base import FloatArray, Network, assemble

ROWS = 8
"""Of the passes that those of one row are compared with."""
FACTOR = 4.0
"""Of the largest difference that was measured: other shapes and other places may be worse than those tried."""
_PREFILLED = 24  # tokens in front of those that are compared, at most


def measure_difference(network: Network, cache: KVCache, texts: Sequence[Sequence[int]]) -> float:
    """Largest |difference| of logits between passes of 1 and of `ROWS` rows over the same texts; 0 where every row has the same bits.

    Args:
        cache: the network's; nothing else runs in it.
        texts: token ids, each of at least two tokens.
    """
    worst = 0.0
    for text in texts:
        start = min(_PREFILLED, len(text) // 2)
        single, several = (_rows(network, cache, text, start, count) for count in (1, ROWS))
        worst = max([worst, *(largest_difference(one, other) for one, other in zip(single, several, strict=True))])
    return worst


def _rows(network: Network, cache: KVCache, text: Sequence[int], start: int, count: int) -> list[FloatArray]:
    """The logits behind token `start` and those that follow, `count` rows a pass; the tokens before it run in one pass."""
    sequence = cache.new_sequence()
    rows: list[FloatArray] = []
    try:
        if start:
            _forward(network, cache, sequence, text[:start])
        rest = iter(text[start:])
        while tokens := list(islice(rest, count)):
            rows.extend(_forward(network, cache, sequence, tokens))
    finally:
        cache.release(sequence)
    return rows


def _forward(network: Network, cache: KVCache, sequence: CachedSequence, tokens: Sequence[int]) -> FloatArray:
    plan = cache.reserve(sequence, range(-1, len(tokens) - 1))
    logits = np.array(network.forward(*assemble([plan], [tokens], [range(len(tokens))])).logits)
    cache.keep_path(sequence, len(tokens) - 1)
    return logits
