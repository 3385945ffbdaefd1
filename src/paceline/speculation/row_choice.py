"""Which guesses are worth their rows: a pure function of what each is expected to bring and of what passes cost."""

import math
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
        speedup: of its requests over a step without guesses, their geometric mean.
        drafted_speedup: that of the best choice with guesses, whether or not it was taken; 0 = none is possible.
    """

    counts: Sequence[int]
    tokens: float
    seconds: float
    plain_s: float
    plain_tokens: float
    speedup: float = 1.0
    drafted_speedup: float = 0.0

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
    """As many guesses of each request as make the requests fastest, in the geometric mean of their speeds; none where that is best.

    A guess helps one request and delays all: in that mean nobody's may delay the others by more than they bring.
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
    order = sorted([(-more, depth, index) for index, own in enumerate(gains) for depth, more in enumerate(_speedups(own))])
    deepest, guessing_s = [0] * len(guessing), 0.0
    num_requests, faster = float(size + others), 0.0  # logarithms of the speeds, all together
    best, best_s, best_mean, most_mean, least_mean = 0, plain_s, 0.0, -math.inf, math.log1p(least_gain)
    num_taken = min(len(order), len(times) - 1)
    for number, (more, depth, index) in enumerate(order[:num_taken], start=1):
        faster -= more
        drafter = drafters[index] if drafters else 0
        if depth >= deepest[drafter]:
            fixed_s, deeper_s = guessing[drafter]
            guessing_s += deeper_s * (depth + 1 - deepest[drafter]) + (fixed_s if deepest[drafter] == 0 else 0.0)
            deepest[drafter] = depth + 1
        if number > ALL_COUNTS and number % 4 and number < num_taken:
            continue
        seconds = times[number] + guessing_s
        mean = faster / num_requests - math.log(seconds / plain_s)
        most_mean = max(most_mean, mean)
        if mean > best_mean and mean >= least_mean:
            best, best_s, best_mean = number, seconds, mean
    counts = [0] * size
    for _, _, index in order[:best]:
        counts[index] += 1
    tokens = num_requests + sum([sum(own[:count]) for own, count in zip(gains, counts, strict=True)])
    return Choice(counts, tokens, best_s, plain_s, num_requests, math.exp(best_mean), math.exp(most_mean))


def _speedups(gains: Sequence[float]) -> list[float]:
    """By how much each guess of a request makes it faster, as logarithms, once those before it are taken."""
    found, tokens = list[float](), 1.0
    for gain in gains:
        found.append(math.log1p(gain / tokens))
        tokens += gain
    return found


def worth_keeping_together(gains: Sequence[Sequence[float]], times: Sequence[float], others: int = 0, least_gain: float = 0.0) -> list[int]:
    """How many of the guesses that were made for several requests are worth their rows, each request's best ones first.

    Args:
        gains: per request, expected tokens of each, in descending order.
        times: seconds of the pass by how many of them it has; as many as it has times for may be kept.
        others: requests without any.
        least_gain: what the requests must be faster by, as a share, in the mean.
    """
    order = sorted([(-more, index) for index, own in enumerate(gains) for more in _speedups(own)])
    num_requests, faster = len(gains) + others, 0.0
    best, best_mean, least_mean = 0, 0.0, math.log1p(least_gain)
    num_taken = min(len(order), len(times) - 1)
    for number, (more, _) in enumerate(order[:num_taken], start=1):
        faster -= more
        if number > ALL_COUNTS and number % 4 and number < num_taken:
            continue
        mean = faster / num_requests - math.log(times[number] / times[0])
        if mean > best_mean and mean >= least_mean:
            best, best_mean = number, mean
    counts = [0] * len(gains)
    for _, index in order[:best]:
        counts[index] += 1
    return counts


def worth_keeping(gains: Sequence[float], times: Sequence[float], rate: float) -> int:
    """How many of the guesses that were made for a lone request are worth their rows; what they cost to make is spent.

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
