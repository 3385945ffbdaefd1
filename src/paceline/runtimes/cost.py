"""Forward profile: the seconds of a forward pass by its number of rows, measured on the machine it will run on."""

import math
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
"""Row counts of a profile, the most important first. Kernels compute eight rows at a time, so both sides of a multiple of 8 are timed."""
NUM_REQUIRED_COUNTS = 3  # number of first row counts that are timed however long that takes
PROFILING_TIME_S = 0.7  # time limit for profiling the other row counts
MAX_ROUNDS = 6  # maximum number of passes per row count
NUM_ADDED_CACHED_ROWS = 1024  # cached rows added to measure how long reading the cache takes
VALIDATION_ROW_COUNTS = (1, 8, 16)  # row counts of the passes that check a stored profile
TOLERANCE = 0.15  # relative error up to which a stored profile is used

_FORMAT = 1  # of stored profiles
_TOKEN_STRIDE = 7919  # step between token ids of a pass: distinct tokens select different experts, as in real text


@dataclass(frozen=True, slots=True)
class ForwardProfile:
    """Measured seconds of a forward pass.

    Attributes:
        seconds: by rows, of one sequence with `PROFILED_CONTEXT_LEN` cached rows; ascending in rows and in seconds.
        cached_row_read_s: added for each further cached row of a sequence, whatever the number of rows that attend to it.
        cached_row_attention_s: added for each further cached row and each row that attends to it.
    """

    seconds: Mapping[int, float]
    cached_row_read_s: float = 0.0
    cached_row_attention_s: float = 0.0

    @classmethod
    def from_samples(
        cls, measured: Mapping[int, float], cached_row_read_s: float = 0.0, cached_row_attention_s: float = 0.0
    ) -> "ForwardProfile":
        """Return a profile of measured seconds. A sample slower than one with more rows was disturbed, and is reduced to it."""
        seconds: dict[int, float] = {}
        least = float("inf")
        for rows in sorted(measured, reverse=True):
            least = seconds[rows] = min(least, measured[rows])
        return cls(dict(sorted(seconds.items())), max(0.0, cached_row_read_s), max(0.0, cached_row_attention_s))

    def seconds_at(self, num_rows: int) -> float:
        """Return the seconds of so many rows, interpolated linearly between the counts that were timed, and extrapolated beyond them."""
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
        """Return the seconds that reading the cache adds.

        Args:
            cached_len: sum over the sequences of their cached rows beyond `PROFILED_CONTEXT_LEN`.
            rows_per_sequence: rows of a sequence that attend to them, on average.
        """
        return (self.cached_row_read_s + self.cached_row_attention_s * rows_per_sequence) * cached_len

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form, which is stored between runs."""
        return {
            "seconds": {str(rows): value for rows, value in self.seconds.items()},
            "sequence_s": self.cached_row_read_s,
            "row_s": self.cached_row_attention_s,
        }

    @classmethod
    def from_json(cls, stored: Any) -> "ForwardProfile | None":
        """Return the profile of a JSON form; None if it is not valid."""
        try:
            seconds = {int(rows): float(value) for rows, value in stored["seconds"].items()}
            profile = cls.from_samples(seconds, float(stored["sequence_s"]), float(stored["row_s"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        is_usable = len(seconds) > 1 and all(rows > 0 and 0.0 < value < 1e4 for rows, value in seconds.items())
        return profile if is_usable else None


def profile_forward(runtime: Network, cache: KVCache, profiles: ProfileCache, *, max_model_len: int) -> ForwardProfile:
    """Return the forward profile: the stored one if three passes agree with it, otherwise a new one.

    Args:
        cache: the runtime's current cache.
        profiles: stored profiles, by network, type of weights, threads and processor.
        max_model_len: positions that the runtime is prepared for.
    """
    key = profile_key("passes", _FORMAT, runtime.config, runtime.capabilities, runtime.version)
    stored = ForwardProfile.from_json(profiles.get(key)) if runtime.version else None
    if stored is not None:
        measured = time_passes(runtime, cache, VALIDATION_ROW_COUNTS, max_model_len=max_model_len, repeats=1)
        if all(abs(seconds / stored.seconds_at(rows) - 1.0) <= TOLERANCE for rows, seconds in measured.items()):
            return stored
    profile = measure_profile(runtime, cache, max_model_len=max_model_len)
    if runtime.version:
        profiles.put(key, profile.as_json())
    return profile


def measure_profile(runtime: Network, cache: KVCache, *, max_model_len: int, seconds: float = PROFILING_TIME_S) -> ForwardProfile:
    """Measure a profile in about `seconds`: the fastest pass of each row count, and what reading the cache adds.

    The row counts take turns, so that a drift of the machine's speed affects all of them alike.

    Args:
        max_model_len: positions that the runtime is prepared for. Passes that do not fit these or the cache are left out.
    """
    room = min(max_model_len, cache.max_slots)
    counts = [count for count in ROW_COUNTS if count <= max(1, room // 2)]
    if len(counts) < 2:
        counts = [1, 2] if room > 2 else [1]
    with _TimedSequence(runtime, cache, min(PROFILED_CONTEXT_LEN, room - max(counts))) as sequence:
        start = time.perf_counter()
        sequence.time(1)  # warm-up
        fastest: dict[int, float] = {}
        for round_number in range(MAX_ROUNDS):
            for number, count in enumerate(counts):
                is_required = round_number == 0 and number < NUM_REQUIRED_COUNTS
                if is_required or time.perf_counter() - start < seconds:
                    fastest[count] = min(sequence.time(count), fastest.get(count, math.inf))
        cached_row_read_s = cached_row_attention_s = 0.0
        if sequence.extend_cache(NUM_ADDED_CACHED_ROWS, room - max(VALIDATION_ROW_COUNTS)):
            near = ForwardProfile.from_samples(fastest)
            far = {count: min(sequence.time(count) for _ in range(2)) for count in (1, 8)}
            added = {count: max(0.0, far_s - near.seconds_at(count)) / NUM_ADDED_CACHED_ROWS for count, far_s in far.items()}
            cached_row_attention_s = max(0.0, added[8] - added[1]) / 7
            cached_row_read_s = max(0.0, added[1] - cached_row_attention_s)
    return ForwardProfile.from_samples(fastest, cached_row_read_s, cached_row_attention_s)


def time_passes(
    runtime: Network,
    cache: KVCache,
    row_counts: Sequence[int],
    *,
    max_model_len: int,
    cached_len: int = PROFILED_CONTEXT_LEN,
    repeats: int = 5,
    with_logits: bool = True,
) -> dict[int, float]:
    """Return the median seconds of passes of one sequence, by row count.

    The row counts take turns, so that a drift of the machine's speed affects all of them alike.

    Args:
        cache: the runtime's current cache.
        max_model_len: positions that the runtime is prepared for. If these or the cache are short, fewer rows are cached, and a pass that
            does not fit is timed with fewer rows.
        with_logits: whether logits of all rows are computed, as in verification, or of none, as in prefill.
    """
    room = min(max_model_len, cache.max_slots)
    cached_len = max(1, min(cached_len, room - max(row_counts)))
    times: dict[int, list[float]] = {count: [] for count in row_counts}
    with _TimedSequence(runtime, cache, cached_len, with_logits=with_logits) as sequence:
        for repeat in range(repeats + 1):
            for count in row_counts:
                seconds = sequence.time(min(count, room - cached_len))
                if repeat:  # the first round warms up
                    times[count].append(seconds)
    return {count: statistics.median(own) for count, own in times.items()}


class _TimedSequence:
    """A sequence whose passes are timed. It shares no rows with requests, is released in the end, and its passes are not counted.

    Args:
        cached_len: rows that are cached before anything is timed.
    """

    def __init__(self, runtime: Network, cache: KVCache, cached_len: int, *, with_logits: bool = True) -> None:
        self._runtime, self._cache, self._with_logits = runtime, cache, with_logits
        self._cached_len, self._num_passes = max(1, cached_len), runtime.num_passes

    def __enter__(self) -> "_TimedSequence":
        self._sequence: CachedSequence = self._cache.new_sequence()
        try:
            self._run(self._cached_len, is_prefill=True)
            self._cache.keep_path(self._sequence, self._cached_len - 1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cache.release(self._sequence)
        self._runtime.num_passes = self._num_passes

    def time(self, count: int) -> float:
        """Return the seconds of a pass with `count` rows, which are dropped again."""
        start = time.perf_counter()
        self._run(count)
        seconds = time.perf_counter() - start
        self._cache.cancel(self._sequence)
        return seconds

    def extend_cache(self, num_rows: int, room: int) -> bool:
        """Add `num_rows` cached rows without a pass; return False if they do not fit or if a layer caches more than keys and values."""
        layer_caches = [one for one in self._cache.layer_caches if isinstance(one, FullAttentionCache)]
        if len(layer_caches) != len(self._cache.layer_caches) or room < self._cached_len + num_rows:
            return False
        plan = self._cache.reserve(self._sequence, range(-1, num_rows - 1), num_rows)
        for layer_cache in layer_caches:
            for block in plan.paths[0].block_table[self._cached_len // plan.block_size :]:
                layer_cache.fill_block(block)  # memory that was never written has no pages, so reading it would be too fast
        self._cache.keep_path(self._sequence, num_rows - 1)
        return True

    def _run(self, count: int, *, is_prefill: bool = False) -> None:
        plan = self._cache.reserve(self._sequence, range(-1, count - 1), count if is_prefill or not self._with_logits else 1)
        token_ids = [_TOKEN_STRIDE * (1 + row) % self._runtime.config.vocab_size for row in range(count)]
        self._runtime.forward(*assemble([plan], [token_ids], [range(count) if self._with_logits else ()]))
