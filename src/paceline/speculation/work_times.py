"""Seconds of work that takes so long a time and so long for each part of it, learned as it is done."""

from collections.abc import Sequence
from dataclasses import dataclass

_KEEP = 0.96  # of the weight of all earlier work, whenever some is done
_PRIMED, _PRIMED_Y = 8.0, 4.0  # measurements that a known time stands for, and the parts of each
_MOST_OVER = 3.0  # a time is counted as at most so many times what was expected: one slow call says nothing


@dataclass(slots=True)
class LinearTime:
    """seconds = a · x + b · y, both at least 0: least squares over what was measured, later times weighing more.

    With x = 1 always, a is what the work takes however much of it there is.
    """

    is_known: bool = False
    _xx: float = 0.0
    _xy: float = 0.0
    _yy: float = 0.0
    _xs: float = 0.0
    _ys: float = 0.0
    _a: float = 0.0
    _b: float = 0.0

    @classmethod
    def of_each(cls, seconds: float) -> "LinearTime":
        """Known before any was done: so many seconds for each y. As good as a few measurements."""
        known = cls(is_known=True)
        known._xx, known._xy, known._yy = _PRIMED, _PRIMED * _PRIMED_Y, _PRIMED * _PRIMED_Y**2
        known._xs, known._ys, known._b = known._xy * seconds, known._yy * seconds, seconds
        return known

    def observe(self, x: float, y: float, seconds: float) -> None:
        """Told how long (x, y) took."""
        self.observe_several(x, y, (seconds,))

    def observe_several(self, x: float, y: float, times: Sequence[float]) -> None:
        """Told how long (x, y) took each time that it was done."""
        first = 0
        if not self.is_known and times:
            self._add(x, y, times[:1])
            first = 1
        while first < len(times):
            most = _MOST_OVER * self.at(x, y) + 1e-5
            end = next((index for index in range(first, len(times)) if times[index] > most), len(times))
            if end == first:  # what comes next is counted as more, once this was
                self._add(x, y, (most,))
                first += 1
            else:
                self._add(x, y, times[first:end])
                first = end

    def _add(self, x: float, y: float, times: Sequence[float]) -> None:
        kept, weight, total = 1.0, 0.0, 0.0
        for seconds in times:
            kept, weight, total = _KEEP * kept, _KEEP * weight + 1.0, _KEEP * total + seconds
        self.is_known = True
        self._xx, self._xy, self._yy = kept * self._xx + weight * x * x, kept * self._xy + weight * x * y, kept * self._yy + weight * y * y
        self._xs, self._ys = kept * self._xs + x * total, kept * self._ys + y * total
        self._solve()

    def at(self, x: float, y: float) -> float:
        """Seconds that (x, y) will take; 0 before anything was measured."""
        return self._a * x + self._b * y

    @property
    def parts(self) -> tuple[float, float]:
        """(a, b)"""
        return self._a, self._b

    def _solve(self) -> None:
        determinant = self._xx * self._yy - self._xy * self._xy
        if determinant > 1e-3 * self._xx * self._yy:
            a = (self._yy * self._xs - self._xy * self._ys) / determinant
            b = (self._xx * self._ys - self._xy * self._xs) / determinant
            if a >= 0.0 and b >= 0.0:
                self._a, self._b = a, b
                return
            if a < 0.0:
                self._a, self._b = 0.0, max(0.0, self._ys / self._yy)
                return
        elif self._yy > 0.0 and self._b > 0.0:  # always the same work: what is known of its parts keeps its proportion
            known = self._a * self._xx + self._b * self._xy
            if known > 0.0:
                scale = self._xs / known
                self._a, self._b = self._a * scale, self._b * scale
                return
        elif self._yy > 0.0:  # all of it is taken to grow with the work
            self._a, self._b = 0.0, max(0.0, self._ys / self._yy)
            return
        self._a, self._b = max(0.0, self._xs / self._xx) if self._xx > 0.0 else 0.0, 0.0
