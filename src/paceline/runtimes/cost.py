"""Forward profile: how many seconds a forward pass takes on this machine, by its number of rows."""

import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.kv_cache.full_attention import FullAttentionCache
from paceline.runtimes.base import Network, assemble_pass
from paceline.runtimes.profile_cache import ProfileCache, profile_key

PROFILED_CONTEXT_LEN = 64  # cached rows of the sequence whose passes are timed

PROFILED_ROW_COUNTS = (1, 5, 9, 3, 17, 2, 8, 16, 4, 6, 12, 33, 32, 24, 64)
"""Row counts of a profile, the most important first. Kernels compute 8 rows at a time, so times jump after multiples of 8."""
NUM_REQUIRED_ROW_COUNTS = 3  # this many of PROFILED_ROW_COUNTS are timed even after PROFILING_TIME_S
PROFILING_TIME_S = 0.7  # after this time, no other row count is timed
MAX_PROFILING_ROUNDS = 6  # a round times one pass of each row count
NUM_ADDED_CACHED_ROWS = 1024  # passes with this many more cached rows are timed to measure the attention time of a cached row
VALIDATION_ROW_COUNTS = (1, 8, 16)  # row counts that are timed to check a stored profile
MIN_RELATIVE_ROW_COST = 0.002  # each additional row of a pass adds at least this share of the time of a one-row pass
MAX_PROFILE_DEVIATION = 0.15  # a stored profile is used if new times differ from its times by at most this share

_PROFILE_FORMAT = 1  # version of the JSON form of profiles
_TOKEN_STRIDE = 7919  # difference of successive token ids of a timed pass: different tokens choose different experts, as in real text


@dataclass(frozen=True, slots=True)
class ForwardProfile:
    """Measured seconds of a forward pass.

    Attributes:
        seconds: seconds by number of rows, for one sequence with `PROFILED_CONTEXT_LEN` cached rows. More rows never take less time.
        cached_row_read_s: seconds for each cached row beyond `PROFILED_CONTEXT_LEN`, however many rows of the pass attend to it.
        cached_row_attention_s: seconds for each pair of such a cached row and a row of the pass that attends to it.
    """

    seconds: Mapping[int, float]
    cached_row_read_s: float = 0.0
    cached_row_attention_s: float = 0.0

    @classmethod
    def from_samples(
        cls, measured: Mapping[int, float], cached_row_read_s: float = 0.0, cached_row_attention_s: float = 0.0
    ) -> "ForwardProfile":
        """Return a profile of measured seconds by number of rows. If a larger pass took less time, its time is used for the smaller one.

        Where several row counts take the same time, as on GPUs, each row adds MIN_RELATIVE_ROW_COST: the cost model estimates the time of
        a row from ratios of measured to profiled times, for which the profiled times must differ.
        """
        seconds: dict[int, float] = {}
        shortest = float("inf")
        for rows in sorted(measured, reverse=True):
            shortest = seconds[rows] = min(shortest, measured[rows])
        fewest = min(seconds)
        for rows in seconds:
            seconds[rows] = max(seconds[rows], seconds[fewest] * (1.0 + MIN_RELATIVE_ROW_COST * (rows - fewest)))
        return cls(dict(sorted(seconds.items())), max(0.0, cached_row_read_s), max(0.0, cached_row_attention_s))

    def seconds_at(self, num_rows: int) -> float:
        """Return the seconds of a pass of `num_rows` rows, interpolated linearly between measured row counts."""
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

    def attention_s(self, cached_len: float, rows_per_sequence: float) -> float:
        """Return the seconds that attention to cached rows after the first `PROFILED_CONTEXT_LEN` adds to a pass.

        Args:
            cached_len: cached rows after the first `PROFILED_CONTEXT_LEN` of each sequence, summed over the sequences.
            rows_per_sequence: rows of the pass for each sequence, on average.
        """
        return (self.cached_row_read_s + self.cached_row_attention_s * rows_per_sequence) * cached_len

    def as_json(self) -> dict[str, Any]:
        """Return the profile as JSON values, to be stored between runs."""
        return {
            "seconds": {str(rows): value for rows, value in self.seconds.items()},
            "sequence_s": self.cached_row_read_s,
            "row_s": self.cached_row_attention_s,
        }

    @classmethod
    def from_json(cls, stored: Any) -> "ForwardProfile | None":
        """Return the profile from which `as_json` made `stored`; None if `stored` is not valid."""
        try:
            seconds = {int(rows): float(value) for rows, value in stored["seconds"].items()}
            profile = cls.from_samples(seconds, float(stored["sequence_s"]), float(stored["row_s"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        is_usable = len(seconds) > 1 and all(rows > 0 and 0.0 < value < 1e4 for rows, value in seconds.items())
        return profile if is_usable else None


def profile_forward(network: Network, cache: KVCache, profiles: ProfileCache, *, max_model_len: int) -> ForwardProfile:
    """Return the stored forward profile of a network if passes of `VALIDATION_ROW_COUNTS` rows agree with it, else a new one.

    Args:
        cache: the network's current cache.
        profiles: where profiles are stored, by network, types, threads and processor.
        max_model_len: maximum length of a sequence.
    """
    key = profile_key("passes", _PROFILE_FORMAT, network.config, network.capabilities, network.execution_key)
    stored = ForwardProfile.from_json(profiles.get(key)) if network.execution_key else None
    if stored is not None:
        measured = time_passes(network, cache, VALIDATION_ROW_COUNTS, max_model_len=max_model_len, num_rounds=1)
        if all(abs(seconds / stored.seconds_at(rows) - 1.0) <= MAX_PROFILE_DEVIATION for rows, seconds in measured.items()):
            return stored
    profile = measure_profile(network, cache, max_model_len=max_model_len)
    if network.execution_key:
        profiles.put(key, profile.as_json())
    return profile


def measure_profile(network: Network, cache: KVCache, *, max_model_len: int) -> ForwardProfile:
    """Measure a profile in about `PROFILING_TIME_S`: the fastest pass of each row count, and the attention time per cached row.

    Each round times every row count once, so that a change of clock speed affects all row counts alike.

    Args:
        max_model_len: maximum length of a sequence. Row counts that exceed it or the cache are not measured.
    """
    max_len = min(max_model_len, cache.max_slots)
    counts = [count for count in PROFILED_ROW_COUNTS if count <= max(1, max_len // 2)]
    if len(counts) < 2:
        counts = [1, 2] if max_len > 2 else [1]
    with _TimedSequence(network, cache, min(PROFILED_CONTEXT_LEN, max_len - max(counts))) as sequence:
        start = time.perf_counter()
        sequence.time_pass(1)  # warm-up
        fastest: dict[int, float] = {}
        for round_number in range(MAX_PROFILING_ROUNDS):
            for number, count in enumerate(counts):
                is_required = round_number == 0 and number < NUM_REQUIRED_ROW_COUNTS
                if is_required or time.perf_counter() - start < PROFILING_TIME_S:
                    fastest[count] = min(sequence.time_pass(count), fastest.get(count, math.inf))
        cached_row_read_s = cached_row_attention_s = 0.0
        if sequence.extend_cache(NUM_ADDED_CACHED_ROWS, max_len - max(VALIDATION_ROW_COUNTS)):
            profile = ForwardProfile.from_samples(fastest)
            longer = {count: min(sequence.time_pass(count) for _ in range(2)) for count in (1, 8)}
            added_s = {count: max(0.0, own_s - profile.seconds_at(count)) / NUM_ADDED_CACHED_ROWS for count, own_s in longer.items()}
            cached_row_attention_s = max(0.0, added_s[8] - added_s[1]) / 7
            cached_row_read_s = max(0.0, added_s[1] - cached_row_attention_s)
    return ForwardProfile.from_samples(fastest, cached_row_read_s, cached_row_attention_s)


def time_passes(
    network: Network,
    cache: KVCache,
    row_counts: Sequence[int],
    *,
    max_model_len: int,
    cached_len: int = PROFILED_CONTEXT_LEN,
    num_rounds: int = 5,
    with_logits: bool = True,
) -> dict[int, float]:
    """Return the median seconds of a pass of one sequence, by row count.

    Each round times every row count once, so that a change of clock speed affects all row counts alike.

    Args:
        cache: the network's current cache.
        max_model_len: maximum length of a sequence. If it or the cache is too short, fewer rows are cached and passes have fewer rows.
        cached_len: cached rows of the sequence before the pass.
        num_rounds: timed passes of each row count.
        with_logits: whether logits of all rows are computed, as in verification; otherwise none are, as in prefill.
    """
    max_len = min(max_model_len, cache.max_slots)
    cached_len = max(1, min(cached_len, max_len - max(row_counts)))
    times: dict[int, list[float]] = {count: [] for count in row_counts}
    with _TimedSequence(network, cache, cached_len, with_logits=with_logits) as sequence:
        for round_number in range(num_rounds + 1):
            for count in row_counts:
                seconds = sequence.time_pass(min(count, max_len - cached_len))
                if round_number:  # the first round is a warm-up
                    times[count].append(seconds)
    return {count: statistics.median(samples) for count, samples in times.items()}


class _TimedSequence:
    """A sequence whose passes are timed and not counted in `Network.num_passes`. As a context manager, releases its cache blocks.

    Args:
        cached_len: cached rows before each timed pass.
    """

    def __init__(self, network: Network, cache: KVCache, cached_len: int, *, with_logits: bool = True) -> None:
        self._network, self._cache, self._with_logits = network, cache, with_logits
        self._cached_len, self._num_passes = max(1, cached_len), network.num_passes

    def __enter__(self) -> "_TimedSequence":
        self._sequence: CachedSequence = self._cache.new_sequence()
        try:
            self._run_pass(self._cached_len, is_prefill=True)
            self._cache.keep_path(self._sequence, self._cached_len - 1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cache.release_sequence(self._sequence)
        self._network.num_passes = self._num_passes

    def time_pass(self, num_rows: int) -> float:
        """Return the seconds of a pass of `num_rows` rows. The rows are removed from the cache afterwards."""
        start = time.perf_counter()
        self._run_pass(num_rows)
        seconds = time.perf_counter() - start
        self._cache.drop_reserved_rows(self._sequence)
        return seconds

    def extend_cache(self, num_rows: int, max_len: int) -> bool:
        """Add `num_rows` cached rows without a pass. Return False if they do not fit, or if a layer has no full-attention cache."""
        layer_caches = [cache for cache in self._cache.layer_caches if isinstance(cache, FullAttentionCache)]
        if len(layer_caches) != len(self._cache.layer_caches) or max_len < self._cached_len + num_rows:
            return False
        plan = self._cache.reserve_rows(self._sequence, range(-1, num_rows - 1), num_rows)
        for layer_cache in layer_caches:
            for block in plan.block_table[self._cached_len // plan.block_size :]:
                layer_cache.fill_block(block)  # memory that was never written would be read faster than a real cache
        self._cache.keep_path(self._sequence, num_rows - 1)
        return True

    def _run_pass(self, num_rows: int, *, is_prefill: bool = False) -> None:
        plan = self._cache.reserve_rows(self._sequence, range(-1, num_rows - 1), num_rows if is_prefill or not self._with_logits else 1)
        token_ids = [_TOKEN_STRIDE * (1 + row) % self._network.config.vocab_size for row in range(num_rows)]
        self._network.forward(*assemble_pass([plan], [token_ids], [range(num_rows) if self._with_logits else ()]))
