"""What a pass costs by its number of rows, measured on the machine it will run on."""

import statistics
import time
from collections.abc import Sequence

from paceline.kv_cache.paged import CachedSequence, KVCache
from paceline.runtimes.base import Network, assemble

CACHED_LEN = 64
_SPREAD = 7919  # from row to row another token: where experts are chosen, rows of a text read more of them than one row does


def time_passes(
    runtime: Network,
    cache: KVCache,
    row_counts: Sequence[int],
    *,
    max_context: int,
    cached_len: int = CACHED_LEN,
    repeats: int = 5,
    wants_logits: bool = True,
) -> dict[int, float]:
    """t(M): median seconds of a pass with M rows of one sequence behind `cached_len` cached rows.

    The row counts take turns, so that a drift of the machine's speed hits all of them alike. Rows share nothing with any request:
    a sequence is made for the measurement and released, and its passes are not counted.

    Args:
        cache: the runtime's current cache.
        max_context: positions the runtime is prepared for. Where that or the cache is short, fewer rows are cached, and a pass
            that has no room is timed with the rows that have.
        wants_logits: of all rows, as where guesses are checked; of none, as where a prompt is read.
    """
    room = min(max_context, cache.max_slots)
    cached_len = max(1, min(cached_len, room - max(row_counts)))
    num_passes, sequence = runtime.num_passes, cache.new_sequence()
    times: dict[int, list[float]] = {count: [] for count in row_counts}
    try:
        _run(runtime, cache, sequence, cached_len, wants_logits=wants_logits, is_known=True)
        cache.keep_path(sequence, cached_len - 1)
        for repeat in range(repeats + 1):
            for count in row_counts:
                start = time.perf_counter()
                _run(runtime, cache, sequence, min(count, room - cached_len), wants_logits=wants_logits)
                if repeat:  # the first round warms up
                    times[count].append(time.perf_counter() - start)
                cache.cancel(sequence)
    finally:
        cache.release(sequence)
        runtime.num_passes = num_passes
    return {count: statistics.median(own) for count, own in times.items()}


def _run(runtime: Network, cache: KVCache, sequence: CachedSequence, count: int, *, wants_logits: bool, is_known: bool = False) -> None:
    plan = cache.reserve(sequence, range(-1, count - 1), count if is_known or not wants_logits else 1)
    token_ids = [_SPREAD * (1 + row) % runtime.config.vocab_size for row in range(count)]
    runtime.forward(*assemble([plan], [token_ids], [range(count) if wants_logits else ()]))
