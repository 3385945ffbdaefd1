"""Seconds of work that takes so long a time and so long for each part of it, learned as it is done."""

from collections.abc import Sequence
from dataclasses import dataclass

_KEEP = 0.96  # of the weight of all earlier work, whenever some is done
_PRIMED, _PRIMED_Y = 8.0, 4.0  # measurements that a known time stands for, and the parts of each
_MOST_OVER = 3.0  # a time is counted as at most so many times what was expected: one slow call says nothing
_EARLY, _QUICK = 8, 3  # measurements of which a quick one says that those before were slow calls; later so many in a row do
_LEAST_KEPT = 0.1  # of what those before said
_FORGOTTEN = 128  # measurements without parts after which nothing is known of these: what forbids them would never be measured again


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
    _num_measured: int = 0
    _num_quick: int = 0  # the last measurements that took far less than was expected
    _num_without: int = 0  # the last measurements that had no parts

    @classmethod
    def of_each(cls, seconds: float) -> "LinearTime":
        """Known before any was done: so many seconds for each y. As good as a few measurements."""
        known = cls(is_known=True, _num_measured=int(_PRIMED))
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
            self._mend(x, y, times[first])
            most = _MOST_OVER * self.at(x, y) + 1e-5
            end = next((index for index in range(first, len(times)) if times[index] > most), len(times))
            if end == first:  # what comes next is counted as more, once this was
                self._add(x, y, (most,))
                first += 1
            else:
                self._add(x, y, times[first:end])
                first = end

    def _mend(self, x: float, y: float, seconds: float) -> None:
        """Count what is known as at most so many times what is measured now, if that was held up by whatever ran beside it."""
        expected = self.at(x, y)
        if expected <= _MOST_OVER * seconds or seconds <= 0.0:
            self._num_quick = 0
            return
        self._num_quick += 1
        if self._num_measured < _EARLY or self._num_quick >= _QUICK:
            kept = max(_LEAST_KEPT, _MOST_OVER * seconds / expected)
            self._xs, self._ys, self._a, self._b = kept * self._xs, kept * self._ys, kept * self._a, kept * self._b

    def _add(self, x: float, y: float, times: Sequence[float]) -> None:
        kept, weight, total = 1.0, 0.0, 0.0
        for seconds in times:
            kept, weight, total = _KEEP * kept, _KEEP * weight + 1.0, _KEEP * total + seconds
        self.is_known = True
        self._num_measured += len(times)
        self._num_without = 0 if y else self._num_without + len(times)
        if self._num_without > _FORGOTTEN:
            self._xy = self._yy = self._ys = 0.0
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
