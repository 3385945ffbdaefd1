"""Forward profile: the seconds of a forward pass by its number of rows, measured on the machine it will run on."""

import statistics
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.kv_cache.full_attention import FullAttentionCache
from paceline.runtimes.base import Network, assemble
from paceline.runtimes.profile_cache import ProfileCache, profile_key

PROFILED_CONTEXT_LEN = 64  # cached rows of the sequence whose passes are timed

ROW_COUNTS = (1, 5, 9, 3, 17, 2, 8, 16, 4, 6, 12, 33, 32, 24, 64)
"""Row counts of a profile, the most important first. Passes get slower in steps of eight rows, so both sides of a step are timed."""
MEASURING_S = 0.7  # for a profile; the warm-up and one pass of each of the first three counts run in any case
MAX_ROUNDS = 6  # over all counts
FAR_LEN = 1024  # cached rows added to time what reading the cache costs
TOLERANCE = 0.15  # relative error of a stored profile

_FIRST = 3
_CHECKED = (1, 8, 16)  # rows of the passes that check a stored profile
_FORMAT = 1  # of stored profiles
_SPREAD = 7919  # from row to row another token: where experts are chosen, rows of a text read more of them than one row does


@dataclass(frozen=True, slots=True)
class ForwardProfile:
    """Measured seconds of a forward pass.

    Attributes:
        seconds: by rows, of one sequence with `PROFILED_CONTEXT_LEN` cached rows; ascending, and more rows never take less.
        sequence_s: added by each further cached row of a sequence, once for all rows of the sequence.
        row_s: added by each further cached row for each row that attends to it.
    """

    seconds: Mapping[int, float]
    sequence_s: float = 0.0
    row_s: float = 0.0

    @classmethod
    def of(cls, measured: Mapping[int, float], sequence_s: float = 0.0, row_s: float = 0.0) -> "ForwardProfile":
        """A profile of measured seconds. A pass never takes longer than one of more rows, so that disturbed samples are corrected."""
        seconds: dict[int, float] = {}
        least = float("inf")
        for rows in sorted(measured, reverse=True):
            least = seconds[rows] = min(least, measured[rows])
        return cls(dict(sorted(seconds.items())), max(0.0, sequence_s), max(0.0, row_s))

    def at(self, num_rows: int) -> float:
        """Seconds of so many rows: linear between the counts that were timed, and beyond the last one."""
        known = self.seconds.get(num_rows)
        if known is not None:
            return known
        rows = list(self.seconds)
        if len(rows) == 1:
            return self.seconds[rows[0]]
        index = min(max(1, bisect_left(rows, num_rows)), len(rows) - 1)
        fewer, more = rows[index - 1 : index + 1]
        slope = (self.seconds[more] - self.seconds[fewer]) / (more - fewer)
        return max(0.0, self.seconds[fewer] + slope * (num_rows - fewer))

    def cache_read_s(self, cached_len: float, rows_per_sequence: float) -> float:
        """Seconds that reading the cache adds.

        Args:
            cached_len: cached rows of all sequences of the pass, each one's beyond `PROFILED_CONTEXT_LEN`.
            rows_per_sequence: rows that attend to them, on average.
        """
        return (self.sequence_s + self.row_s * rows_per_sequence) * cached_len

    def as_json(self) -> dict[str, Any]:
        """What is kept between runs."""
        return {"seconds": {str(rows): value for rows, value in self.seconds.items()}, "sequence_s": self.sequence_s, "row_s": self.row_s}

    @classmethod
    def from_json(cls, kept: Any) -> "ForwardProfile | None":
        """The profile that was kept; None where it is none."""
        try:
            seconds = {int(rows): float(value) for rows, value in kept["seconds"].items()}
            profile = cls.of(seconds, float(kept["sequence_s"]), float(kept["row_s"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        is_usable = len(seconds) > 1 and all(rows > 0 and 0.0 < value < 1e4 for rows, value in seconds.items())
        return profile if is_usable else None


def profile_forward(runtime: Network, cache: KVCache, profiles: ProfileCache, *, max_model_len: int) -> ForwardProfile:
    """Return the forward profile: the stored one if three passes agree with it, else a new one.

    Args:
        cache: the runtime's current cache.
        profiles: where they are kept, by network, weights' type, threads and processor.
        max_model_len: positions the runtime is prepared for.
    """
    key = profile_key("passes", _FORMAT, runtime.config, runtime.capabilities, runtime.version)
    kept = ForwardProfile.from_json(profiles.get(key)) if runtime.version else None
    if kept is not None:
        measured = time_passes(runtime, cache, _CHECKED, max_model_len=max_model_len, repeats=1)
        if all(abs(seconds / kept.at(rows) - 1.0) <= TOLERANCE for rows, seconds in measured.items()):
            return kept
    table = measure_passes(runtime, cache, max_model_len=max_model_len)
    if runtime.version:
        profiles.put(key, table.as_json())
    return table


def measure_passes(runtime: Network, cache: KVCache, *, max_model_len: int, seconds: float = MEASURING_S) -> ForwardProfile:
    """A table of passes, measured in about so many seconds: the fastest of each, and what reading the cache adds.

    The row counts take turns, so that a drift of the machine's speed hits all of them alike.

    Args:
        max_model_len: positions the runtime is prepared for. Where that or the cache is short, larger passes are left out.
    """
    room = min(max_model_len, cache.max_slots)
    counts = [count for count in ROW_COUNTS if count <= max(1, room // 2)]
    if len(counts) < 2:
        counts = [1, 2] if room > 2 else [1]
    with _Measuring(runtime, cache, min(PROFILED_CONTEXT_LEN, room - max(counts))) as measuring:
        start = time.perf_counter()
        fastest = {count: measuring.time(count) for count in counts[:1]}
        is_first, num_rounds = True, 0
        while is_first or (num_rounds < MAX_ROUNDS and time.perf_counter() - start < seconds):
            num_rounds += 1
            for number, count in enumerate(counts):
                if number >= _FIRST and time.perf_counter() - start > seconds:
                    break
                taken = measuring.time(count)
                fastest[count] = taken if is_first else min(taken, fastest.get(count, taken))
            is_first = False
        sequence_s = row_s = 0.0
        if measuring.go_far(FAR_LEN, room - max(_CHECKED)):
            near = ForwardProfile.of(fastest)
            far = {count: min(measuring.time(count) for _ in range(2)) for count in (1, 8)}
            added = {count: max(0.0, taken - near.at(count)) / measuring.num_far for count, taken in far.items()}
            row_s = max(0.0, added[8] - added[1]) / 7
            sequence_s = max(0.0, added[1] - row_s)
    return ForwardProfile.of(fastest, sequence_s, row_s)


def time_passes(
    runtime: Network,
    cache: KVCache,
    row_counts: Sequence[int],
    *,
    max_model_len: int,
    cached_len: int = PROFILED_CONTEXT_LEN,
    repeats: int = 5,
    wants_logits: bool = True,
) -> dict[int, float]:
    """t(M): median seconds of a pass with M rows of one sequence with `cached_len` cached rows.

    The row counts take turns, so that a drift of the machine's speed hits all of them alike. Rows share nothing with any request:
    a sequence is made for the measurement and released, and its passes are not counted.

    Args:
        cache: the runtime's current cache.
        max_model_len: positions the runtime is prepared for. Where that or the cache is short, fewer rows are cached, and a pass
            that has no room is timed with the rows that have.
        wants_logits: of all rows, as in verification; of none, as in prefill.
    """
    room = min(max_model_len, cache.max_slots)
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
        filled = [one for one in self._cache.layer_caches if isinstance(one, FullAttentionCache)]
        if len(filled) != len(self._cache.layer_caches) or room < self._cached_len + num_rows:
            return False
        plan = self._cache.reserve(self._sequence, range(-1, num_rows - 1), num_rows)
        for layer_cache in filled:
            for block in plan.paths[0].block_table[self._cached_len // plan.block_size :]:
                layer_cache.fill_block(block)  # memory that was never written would cost nothing to read
        self._cache.keep_path(self._sequence, num_rows - 1)
        self.num_far = num_rows
        return True

    def _run(self, count: int, *, is_known: bool = False) -> None:
        parents = range(-1, count - 1)
        plan = self._cache.reserve(self._sequence, parents, count if is_known or not self._wants_logits else 1)
        token_ids = [_SPREAD * (1 + row) % self._runtime.config.vocab_size for row in range(count)]
        self._runtime.forward(*assemble([plan], [token_ids], [range(count) if self._wants_logits else ()]))
