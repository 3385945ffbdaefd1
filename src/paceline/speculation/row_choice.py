"""Which guesses are worth their rows: a pure function of what each is expected to bring and of what passes cost."""

from collections.abc import Sequence
from dataclasses import dataclass

ALL_COUNTS = 24  # up to so many rows every number is weighed, above it every fourth


@dataclass(frozen=True, slots=True)
class Choice:
    """What one step is expected to be.

    Attributes:
        counts: guessed rows of each request.
        tokens: that all requests together are expected to emit.
        seconds: the step is expected to take.
        plain_s: it would take without guesses.
        plain_tokens: that it would emit without guesses.
        drafted_speedup: tokens a second of the best choice with guesses over those without, whether or not it was taken; 0 = none is
            possible.
    """

    counts: Sequence[int]
    tokens: float
    seconds: float
    plain_s: float
    plain_tokens: float
    drafted_speedup: float = 0.0

    @property
    def speedup(self) -> float:
        """Expected tokens a second over those without guesses."""
        return self.tokens * self.plain_s / (self.plain_tokens * self.seconds)

    @property
    def rate(self) -> float:
        """Expected tokens a second."""
        return self.tokens / self.seconds


def choose_rows(
    gains: Sequence[Sequence[float]],
    times: Sequence[float],
    guessing: Sequence[tuple[float, float]],
    *,
    drafters: Sequence[int] = (),
    others: int = 0,
    least_gain: float = 0.0,
) -> Choice:
    """As many guesses of each request as bring most tokens a second over the whole batch; none where that is best.

    Guesses are taken in the order of what they bring, whosesoever they are, so for each number of rows the best ones are weighed. Every
    number is, because passes get slower in steps: a row may be worth taking only together with the next.

    Args:
        gains: per request, what its first, second, … guess is expected to bring, each at most as much as the one before it.
        times: seconds of the step by guessed rows of all requests together, without guessing itself; more rows never take less. As
            many rows as it has times for may be guessed.
        guessing: per drafter, seconds of its guesses: those it takes in any case, and those for each token of the deepest.
        drafters: number of each request's drafter; empty = the first one for all.
        others: requests for which nothing can be guessed: they emit a token each, which a longer pass delays.
        least_gain: what the best choice must be faster by, as a share, before it is taken instead of none.
    """
    size, plain_s = len(gains), times[0]
    order = [(-gain, depth, index) for index, own in enumerate(gains) for depth, gain in enumerate(own)]
    if size > 1:
        order.sort()
    deepest, guessing_s = [0] * len(guessing), 0.0
    plain_tokens = tokens = float(size + others)
    least_rate, most_rate = tokens / plain_s * (1.0 + least_gain), 0.0
    best, best_tokens, best_s, best_rate = 0, tokens, plain_s, tokens / plain_s
    num_taken = min(len(order), len(times) - 1)
    for number, (gain, depth, index) in enumerate(order[:num_taken], start=1):
        tokens -= gain
        drafter = drafters[index] if drafters else 0
        if depth >= deepest[drafter]:
            fixed_s, deeper_s = guessing[drafter]
            guessing_s += deeper_s * (depth + 1 - deepest[drafter]) + (fixed_s if deepest[drafter] == 0 else 0.0)
            deepest[drafter] = depth + 1
        if number > ALL_COUNTS and number % 4 and number < num_taken:
            continue
        seconds = times[number] + guessing_s
        rate = tokens / seconds
        most_rate = max(most_rate, rate)
        if rate > best_rate and rate >= least_rate:
            best, best_tokens, best_s, best_rate = number, tokens, seconds, rate
    counts = [0] * size
    for _, _, index in order[:best]:
        counts[index] += 1
    return Choice(counts, best_tokens, best_s, plain_s, plain_tokens, most_rate * plain_s / plain_tokens)


def worth_keeping(gains: Sequence[float], times: Sequence[float], rate: float) -> int:
    """How many of the guesses that were made are worth their rows; what they cost to make is spent.

    Args:
        gains: expected tokens of each, in descending order.
        times: seconds of the pass by how many of them it has.
        rate: tokens a second that time is worth.
    """
    best, best_count, brought = -rate * times[0], 0, 0.0
    for count, gain in enumerate(gains, start=1):
        brought += gain
        if count > ALL_COUNTS and count % 4 and count < len(gains):
            continue
        value = brought - rate * times[count]
        if value > best:
            best, best_count = value, count
    return best_count
