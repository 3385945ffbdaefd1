"""What a pass costs by its rows and by what they read of the cache: a table measured at load, refined by the passes that run."""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from statistics import median
from typing import Any

import numpy as np

CACHED_LEN = 64  # cached rows behind which the rows of the table were timed

_RECENT = 8  # passes of as many rows that count
_FRESH = 3  # from so many on they say more than the table
_MAX_AGE = 1024  # passes since, after which one says nothing of how fast the machine is now
_DOUBTED_AGE, _DOUBTED = 32, 1.5  # passes after which a time is doubted that is so many times what passes run lately lead to expect
_RENEWED = 8  # passes after which times are looked up again
_LOOKED_UP = 32  # times are looked up so many at once
_SPEED_PASSES = 15  # of all kinds, whose median says how fast the machine is now
_LEAST_SPEED, _MOST_SPEED = 0.2, 10.0


class PassKind(IntEnum):
    """What passes over as many rows differ in. Numbers, because they are looked up by it several times a step."""

    PLAIN = auto()
    ADAPTERS = auto()  # rows have adapters
    SCALING = auto()  # X-LoRA's, with the scaling pass in front


_USUAL = {PassKind.PLAIN: 1.0, PassKind.ADAPTERS: 1.0, PassKind.SCALING: 2.0}
"""Times of the table that passes take of which nothing is known."""
_Key = tuple[PassKind, int, int]
"""What passes that take as long have alike: their kind, how many rows there are, and about how many cached ones."""


@dataclass(frozen=True, slots=True)
class PassTable:
    """Measured seconds of a pass.

    Attributes:
        seconds: by rows, of one sequence behind `CACHED_LEN` rows; ascending, and more rows never take less.
        sequence_s: that a pass takes longer for each further cached row of a sequence, whatever rows the sequence brings.
        row_s: and for each cached row that each of its rows sees.
    """

    seconds: Mapping[int, float]
    sequence_s: float = 0.0
    row_s: float = 0.0

    @classmethod
    def of(cls, measured: Mapping[int, float], sequence_s: float = 0.0, row_s: float = 0.0) -> "PassTable":
        """A table of measured seconds: a pass is never slower than one of more rows, so what was disturbed is put right."""
        seconds: dict[int, float] = {}
        least = float("inf")
        for rows in sorted(measured, reverse=True):
            least = seconds[rows] = min(least, measured[rows])
        return cls(dict(sorted(seconds.items())), max(0.0, sequence_s), max(0.0, row_s))

    def at(self, num_rows: int) -> float:
        """Seconds of so many rows: between two that were timed a straight line, beyond the last one the line of the last two."""
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

    def reading_s(self, num_cached: float, num_row_cached: float) -> float:
        """Seconds that reading the cache adds.

        Args:
            num_cached: cached rows of all sequences of the pass, each one's beyond `CACHED_LEN`.
            num_row_cached: the same, each sequence's as often as it brings rows.
        """
        return self.sequence_s * num_cached + self.row_s * num_row_cached

    def as_json(self) -> dict[str, Any]:
        """What is kept between runs."""
        return {"seconds": {str(rows): value for rows, value in self.seconds.items()}, "sequence_s": self.sequence_s, "row_s": self.row_s}

    @classmethod
    def from_json(cls, kept: Any) -> "PassTable | None":
        """The table that was kept; None where it is none."""
        try:
            seconds = {int(rows): float(value) for rows, value in kept["seconds"].items()}
            table = cls.of(seconds, float(kept["sequence_s"]), float(kept["row_s"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        is_usable = len(seconds) > 1 and all(rows > 0 and 0.0 < value < 1e4 for rows, value in seconds.items())
        return table if is_usable else None


@dataclass(slots=True)
class _Recent:
    """Lately measured passes of as many rows: (number of the pass, seconds without what reading the cache adds)."""

    passes: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def seconds(self, now: int) -> float | None:
        """A quick one of them; None where too few are recent. Of a busy machine the quick passes say most of what a pass takes."""
        recent = sorted([seconds for number, seconds in self.passes if now - number <= _MAX_AGE])
        return recent[len(recent) // 4] if len(recent) >= _FRESH else None


@dataclass(slots=True)
class _Slowness:
    """How much longer than in the table passes of one kind took lately, and the last pass that said so; 0 = none has."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_SPEED_PASSES))
    ratio: float = 1.0
    known_at: int = 0

    def observe(self, now: int, ratios: Sequence[float]) -> None:
        if not self.is_known(now):
            self.ratios.clear()
        self.ratios.extend(ratios)
        self.ratio, self.known_at = min(max(median(self.ratios), _LEAST_SPEED), _MOST_SPEED), now + len(ratios)

    def is_known(self, now: int) -> bool:
        return self.known_at > 0 and now - self.known_at <= _MAX_AGE


class PassCosts:
    """Expected seconds of a pass.

    What was measured lately for as many rows, behind about as many cached ones, counts. For other passes the table does, times how much
    slower than the table the machine is now: so a pass that has not run for long is not judged by how busy the machine was then. Passes in
    which rows have adapters take longer, those with a scaling pass about twice as long: each kind is known apart.

    Args:
        table: measured at load.

    Attributes:
        kind: of the passes that are told of and asked for from now on.
    """

    def __init__(self, table: PassTable) -> None:
        self.table = table
        self.kind = PassKind.PLAIN
        self._recent: dict[_Key, _Recent] = {}
        self._slowness = {kind: _Slowness() for kind in PassKind}
        self._num_passes = 0
        self._of_table = np.zeros(0)  # seconds by rows
        self._known: dict[_Key, float | None] = {}  # of this moment
        self._times: dict[_Key, tuple[int, list[float]]] = {}  # with the pass they were looked up at

    def observe(self, num_rows: int, num_cached: float, num_row_cached: float, seconds: float) -> None:
        """Told how long a pass took; arguments as `at`."""
        self.observe_several(num_rows, num_cached, num_row_cached, (seconds,))

    def observe_several(self, num_rows: int, num_cached: float, num_row_cached: float, times: Sequence[float]) -> None:
        """Told how long several passes took, one after another, which had the same to do."""
        self._known.clear()
        reading_s = self.table.reading_s(num_cached, num_row_cached)
        expected_s = max(1e-9, self.table.at(num_rows) + reading_s)
        self._slowness[self.kind].observe(self._num_passes, [seconds / expected_s for seconds in times])
        key = self._key(num_rows, num_cached)
        recent = self._recent.get(key)
        if recent is None:  # the first pass of its kind does not count: memory and kernels are made ready for it
            recent, self._num_passes, times = self._recent.setdefault(key, _Recent()), self._num_passes + 1, times[1:]
        added_s = self._speed * reading_s
        recent.passes.extend([(number, seconds - added_s) for number, seconds in enumerate(times, self._num_passes + 1)])
        self._num_passes += len(times)

    def at(self, num_rows: int, num_cached: float = 0.0, num_row_cached: float = 0.0) -> float:
        """Seconds of a pass of so many rows.

        Args:
            num_cached, num_row_cached: what it reads of the cache, as `PassTable.reading_s`.
        """
        reading_s = self._speed * self.table.reading_s(num_cached, num_row_cached)
        own = self._own(self._key(num_rows, num_cached))
        return max(1e-9, (self._speed * self.table.at(num_rows) if own is None else own) + reading_s)

    def row_times(self, num_rows: int, most: int, num_cached: float, num_row_cached: float) -> tuple[list[float], float]:
        """Seconds of passes of `num_rows` rows and up to `most` more, none less than the one before, looked up now and then.

        Returns:
            [at least most + 1] seconds, and those that reading the cache adds to them for each row, by each of the rows it sees.
        """
        key = self._key(num_rows, num_cached)
        known = self._times.get(key)
        if known is None or len(known[1]) <= most or self._num_passes - known[0] >= _RENEWED:
            times = self._look_up(num_rows, (most + _LOOKED_UP) // _LOOKED_UP * _LOOKED_UP, num_cached, num_row_cached)
            known = self._times[key] = self._num_passes, times
        return known[1], self._speed * self.table.row_s

    def _look_up(self, num_rows: int, count: int, num_cached: float, num_row_cached: float) -> list[float]:
        """[count] what `at` says of passes of `num_rows` rows on, but none less than the one before."""
        end, bucket = num_rows + count, _bucket(num_cached)
        if end > len(self._of_table):
            self._of_table = np.array([self.table.at(rows) for rows in range(2 * end)])
        times = self._speed * self._of_table[num_rows:end]
        for key in self._recent:
            kind, rows, own_bucket = key
            if (kind, own_bucket) == (self.kind, bucket) and num_rows <= rows < end and (own := self._own(key)) is not None:
                times[rows - num_rows] = own
        times += self._speed * self.table.reading_s(num_cached, num_row_cached)
        found: list[float] = np.maximum.accumulate(np.maximum(times, 1e-9)).tolist()
        return found

    def is_fresh(self, num_rows: int, num_cached: float = 0.0) -> bool:
        """Whether passes of so many rows ran lately."""
        return self._own(self._key(num_rows, num_cached)) is not None

    def is_doubted(self, num_rows: int, num_cached: float = 0.0) -> bool:
        """Whether passes of so many rows ran some time ago only, when the machine may have been slower than it is now."""
        key = self._key(num_rows, num_cached)
        own, recent = self._own(key), self._recent.get(key)
        if own is None or recent is None or self._num_passes - recent.passes[-_FRESH][0] <= _DOUBTED_AGE:
            return False
        return own > _DOUBTED * self._speed * self.table.at(num_rows)

    @property
    def _speed(self) -> float:
        """Of passes of which nothing is known, that of the kind of which most is, as the table would have it."""
        own = self._slowness[self.kind]
        if own.is_known(self._num_passes):
            return own.ratio
        kind, known = max(self._slowness.items(), key=lambda one: one[1].known_at)
        return _USUAL[self.kind] / _USUAL[kind] * (known.ratio if known.known_at else 1.0)

    def _key(self, num_rows: int, num_cached: float) -> _Key:
        return self.kind, num_rows, _bucket(num_cached)

    def _own(self, key: _Key) -> float | None:
        if key not in self._known:
            recent = self._recent.get(key)
            self._known[key] = None if recent is None else recent.seconds(self._num_passes)
        return self._known[key]


def _bucket(num_cached: float) -> int:
    """Passes behind about as many cached rows are alike: powers of 2 from 512 on."""
    return (int(num_cached) >> 9).bit_length()
