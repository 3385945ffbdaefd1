"""What a pass costs by its rows, learned from the passes that run."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping

_RECENT = 5  # passes of as many rows that count


class PassTimes:
    """Seconds of a pass by its rows: the fastest of the last ones of as many rows, and a straight line where there was none.

    Of a busy machine the fastest says most of what a pass takes. The first pass of as many rows does not count: memory and kernels are
    made ready for it.

    Args:
        known: rows -> seconds, measured before.
    """

    def __init__(self, known: Mapping[int, float]) -> None:
        self._known = dict(known)
        self._rows = sorted(known)
        self._recent: dict[int, deque[float]] = {}

    def observe(self, num_rows: int, seconds: float) -> None:
        """Told after a pass."""
        recent = self._recent.get(num_rows)
        if recent is None:
            self._recent[num_rows] = deque(maxlen=_RECENT)
            return
        recent.append(seconds)
        if num_rows not in self._known:
            insort(self._rows, num_rows)
        self._known[num_rows] = min(recent)

    def at(self, num_rows: int) -> float:
        """Seconds a pass of so many rows takes; beyond what was measured the nearest line goes on."""
        seconds = self._known.get(num_rows)
        if seconds is not None:
            return seconds
        if len(self._rows) < 2:
            return self._known[self._rows[0]]
        index = min(max(1, bisect_left(self._rows, num_rows)), len(self._rows) - 1)
        fewer, more = self._rows[index - 1 : index + 1]
        slope = max(0.0, self._known[more] - self._known[fewer]) / (more - fewer)
        return max(0.0, self._known[fewer] + slope * (num_rows - fewer))
