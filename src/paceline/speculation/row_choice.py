"""Which guesses are worth their rows: a pure function of what each is expected to bring and of what passes cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

ALL_COUNTS = 24  # up to so many rows every number is weighed, above it every fourth


@dataclass(frozen=True, slots=True)
class Choice:
    """What one step is expected to be.

    Attributes:
        counts: guessed rows of each request.
        tokens: that all requests together are expected to emit.
        seconds: the step is expected to take.
        plain_s: it would take without guesses.
        drafted_speedup: tokens a second of the best choice with guesses over those without, whether or not it was taken; 0 = none is
            possible.
    """

    counts: Sequence[int]
    tokens: float
    seconds: float
    plain_s: float
    drafted_speedup: float = 0.0

    @property
    def speedup(self) -> float:
        """Expected tokens a second over those without guesses."""
        return self.tokens * self.plain_s / (len(self.counts) * self.seconds) if self.counts else 1.0

    @property
    def rate(self) -> float:
        """Expected tokens a second."""
        return self.tokens / self.seconds


Seconds = Callable[[Sequence[int], int], float]
"""(guessed rows of each request, their sum) -> seconds of the step."""


def choose_rows(gains: Sequence[Sequence[float]], seconds: Seconds, most: int, *, least_gain: float = 0.0) -> Choice:
    """As many guesses of each request as bring most tokens a second over the whole batch; none where that is best.

    Guesses are taken in the order of what they bring, whosesoever they are, so for each number of rows the best ones are weighed. Every
    number is, because passes get slower in steps: a row may be worth taking only together with the next.

    Args:
        gains: per request, what its first, second, … guess is expected to bring, each at most as much as the one before it.
        seconds: what the step takes; more rows never take less.
        most: guessed rows of all requests together.
        least_gain: what the best choice must be faster by, as a share, before it is taken instead of none.
    """
    size = len(gains)
    counts = [0] * size
    plain_s = seconds(counts, 0)
    best = plain = Choice(tuple(counts), float(size), plain_s, plain_s)
    order = sorted([(-gain, depth, index) for index, own in enumerate(gains) for depth, gain in enumerate(own)])[: max(0, most)]
    tokens, least_rate, most_rate = float(size), plain.rate * (1.0 + least_gain), 0.0
    for number, (gain, _, index) in enumerate(order, start=1):
        counts[index] += 1
        tokens -= gain
        if number > ALL_COUNTS and number % 4 and number < len(order):
            continue
        taken_s = seconds(counts, number)
        most_rate = max(most_rate, tokens / taken_s)
        if tokens > best.rate * taken_s and tokens >= least_rate * taken_s:
            best = Choice(tuple(counts), tokens, taken_s, plain_s)
    return replace(best, drafted_speedup=most_rate / plain.rate)


def worth_keeping(gains: Sequence[float], seconds: Callable[[int], float], rate: float) -> int:
    """How many of the guesses that were made are worth their rows; what they cost to make is spent.

    Args:
        gains: expected tokens of each, in descending order.
        seconds: of the pass with so many of them.
        rate: tokens a second that time is worth.
    """
    best, best_count, brought = -rate * seconds(0), 0, 0.0
    for count, gain in enumerate(gains, start=1):
        brought += gain
        if count > ALL_COUNTS and count % 4 and count < len(gains):
            continue
        value = brought - rate * seconds(count)
        if value > best:
            best, best_count = value, count
    return best_count
