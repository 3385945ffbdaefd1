"""How far the logits of one and the same position are apart between passes of one row and passes shaped like verification."""

from collections.abc import Sequence

import numpy as np

from paceline.kv_cache.paged import CachedSequence, KVCache
from paceline.proof.exactness.rows import largest_difference
from paceline.runtimes.base import FloatArray, Network, assemble

ROWS = 8
"""Of the passes that those of one row are compared with."""
FACTOR = 4.0
"""Of the largest difference that was measured: other shapes and other places may be worse than those tried."""
_PREFILLED = 24  # tokens in front of those that are compared
_LENGTH = 56  # tokens of a text


def measure_difference(network: Network, cache: KVCache, texts: Sequence[Sequence[int]]) -> float:
    """Largest |difference| of logits between passes of 1 and of `ROWS` rows over the same texts; 0 where every row has the same bits.

    Args:
        cache: the network's; nothing else runs in it.
        texts: token ids, none of them empty; short ones are repeated.
    """
    worst = 0.0
    for given in texts:
        text = ([*given] * -(-_LENGTH // len(given)))[:_LENGTH]
        single, several = (_rows(network, cache, text, count) for count in (1, ROWS))
        worst = max([worst, *(largest_difference(one, other) for one, other in zip(single, several, strict=True))])
    return worst


def _rows(network: Network, cache: KVCache, text: Sequence[int], count: int) -> list[FloatArray]:
    """The logits of the rows behind those that are prefilled, `count` a pass."""
    sequence = cache.new_sequence()
    rows: list[FloatArray] = []
    try:
        _forward(network, cache, sequence, text[:_PREFILLED], is_known=True)
        for first in range(_PREFILLED, _LENGTH, count):
            rows.extend(_forward(network, cache, sequence, text[first : first + count], is_known=False))
    finally:
        cache.release(sequence)
    return rows


def _forward(network: Network, cache: KVCache, sequence: CachedSequence, tokens: Sequence[int], *, is_known: bool) -> FloatArray:
    plan = cache.reserve(sequence, range(-1, len(tokens) - 1), len(tokens) if is_known else 1)
    logits = np.array(network.forward(*assemble([plan], [tokens], [range(len(tokens))])).logits)
    cache.keep_path(sequence, len(tokens) - 1)
    return logits
