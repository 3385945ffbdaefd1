"""What a pass costs by its number of rows, measured on the machine it will run on."""

import statistics
import time
from collections.abc import Sequence

from paceline.kv_cache.key_values import KeyValues
from paceline.kv_cache.paged import CachedSequence, KVCache
from paceline.runtimes.base import Network, assemble
from paceline.runtimes.facts import MeasuredFacts, fact_key
from paceline.runtimes.pass_costs import CACHED_LEN, PassTable

ROW_COUNTS = (1, 5, 9, 3, 17, 2, 8, 16, 4, 6, 12, 33, 32, 24, 64)
"""What a table is made of, the most telling first: passes get slower by steps of eight rows, so both sides of a step are timed."""
MEASURING_S = 0.7  # for a table; the pass that warms up and one of each of the first three rows run in any case
MOST_ROUNDS = 6  # of all rows: of a tiny network they say enough long before
FAR_LEN = 1024  # cached rows behind which reading the cache is timed
TOLERANCE = 0.15  # by which a kept table may be off

_FIRST = 3
_CHECKED = (1, 8, 16)  # rows of the passes that check a kept table
_FORMAT = 1  # of kept tables
_SPREAD = 7919  # from row to row another token: where experts are chosen, rows of a text read more of them than one row does


def pass_table(runtime: Network, cache: KVCache, facts: MeasuredFacts, *, max_context: int) -> PassTable:
    """What passes cost here: as measured before, if three passes agree with that, else measured now.

    Args:
        cache: the runtime's current cache.
        facts: where tables are kept, by network, weights' type, threads and processor.
        max_context: positions the runtime is prepared for.
    """
    key = fact_key("passes", _FORMAT, runtime.config, runtime.capabilities, runtime.version)
    kept = PassTable.from_json(facts.get(key)) if runtime.version else None
    if kept is not None:
        measured = time_passes(runtime, cache, _CHECKED, max_context=max_context, repeats=1)
        if all(abs(seconds / kept.at(rows) - 1.0) <= TOLERANCE for rows, seconds in measured.items()):
            return kept
    table = measure_passes(runtime, cache, max_context=max_context)
    if runtime.version:
        facts.put(key, table.as_json())
    return table


def measure_passes(runtime: Network, cache: KVCache, *, max_context: int, seconds: float = MEASURING_S) -> PassTable:
    """A table of passes, measured in about so many seconds: the fastest of each, and what reading the cache adds.

    The row counts take turns, so that a drift of the machine's speed hits all of them alike.

    Args:
        max_context: positions the runtime is prepared for. Where that or the cache is short, larger passes are left out.
    """
    room = min(max_context, cache.max_slots)
    counts = [count for count in ROW_COUNTS if count <= max(1, room // 2)]
    if len(counts) < 2:
        counts = [1, 2] if room > 2 else [1]
    with _Measuring(runtime, cache, min(CACHED_LEN, room - max(counts))) as measuring:
        start = time.perf_counter()
        fastest = {count: measuring.time(count) for count in counts[:1]}
        is_first, num_rounds = True, 0
        while is_first or (num_rounds < MOST_ROUNDS and time.perf_counter() - start < seconds):
            num_rounds += 1
            for number, count in enumerate(counts):
                if number >= _FIRST and time.perf_counter() - start > seconds:
                    break
                taken = measuring.time(count)
                fastest[count] = taken if is_first else min(taken, fastest.get(count, taken))
            is_first = False
        sequence_s = row_s = 0.0
        if measuring.go_far(FAR_LEN, room - max(_CHECKED)):
            near = PassTable.of(fastest)
            far = {count: min(measuring.time(count) for _ in range(2)) for count in (1, 8)}
            added = {count: max(0.0, taken - near.at(count)) / measuring.num_far for count, taken in far.items()}
            row_s = max(0.0, added[8] - added[1]) / 7
            sequence_s = max(0.0, added[1] - row_s)
    return PassTable.of(fastest, sequence_s, row_s)


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
    times: dict[int, list[float]] = {count: [] for count in row_counts}
    with _Measuring(runtime, cache, cached_len, wants_logits=wants_logits) as measuring:
        for repeat in range(repeats + 1):
            for count in row_counts:
                seconds = measuring.time(min(count, room - cached_len))
                if repeat:  # the first round warms up
                    times[count].append(seconds)
    return {count: statistics.median(own) for count, own in times.items()}


class _Measuring:
    """A sequence that shares nothing with any request and is released in the end; its passes are not counted.

    Args:
        cached_len: rows that are cached before anything is timed.
    """

    def __init__(self, runtime: Network, cache: KVCache, cached_len: int, *, wants_logits: bool = True) -> None:
        self._runtime, self._cache, self._wants_logits = runtime, cache, wants_logits
        self._cached_len, self._num_passes = max(1, cached_len), runtime.num_passes
        self.num_far = 0

    def __enter__(self) -> "_Measuring":
        self._sequence: CachedSequence = self._cache.new_sequence()
        try:
            self._run(self._cached_len, is_known=True)
            self._cache.keep_path(self._sequence, self._cached_len - 1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cache.release(self._sequence)
        self._runtime.num_passes = self._num_passes

    def time(self, count: int) -> float:
        """Seconds of a pass with so many rows, whose rows are dropped again."""
        start = time.perf_counter()
        self._run(count)
        seconds = time.perf_counter() - start
        self._cache.cancel(self._sequence)
        return seconds

    def go_far(self, num_rows: int, room: int) -> bool:
        """Let the sequence have so many cached rows more, which hold no text; returns whether there is room for them."""
        kinds = [memory for memory in self._cache.memories if isinstance(memory, KeyValues)]
        if len(kinds) != len(self._cache.memories) or room < self._cached_len + num_rows:
            return False
        plan = self._cache.reserve(self._sequence, range(-1, num_rows - 1), num_rows)
        for memory in kinds:
            for block in plan.paths[0].block_table[self._cached_len // plan.block_size :]:
                memory.fill_block(block)  # memory that was never written would cost nothing to read
        self._cache.keep_path(self._sequence, num_rows - 1)
        self.num_far = num_rows
        return True

    def _run(self, count: int, *, is_known: bool = False) -> None:
        parents = range(-1, count - 1)
        plan = self._cache.reserve(self._sequence, parents, count if is_known or not self._wants_logits else 1)
        token_ids = [_SPREAD * (1 + row) % self._runtime.config.vocab_size for row in range(count)]
        self._runtime.forward(*assemble([plan], [token_ids], [range(count) if self._wants_logits else ()]))
