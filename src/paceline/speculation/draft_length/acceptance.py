"""Acceptance model: the chance that a drafted token is accepted, given that every token before it in the draft is.

Rates are counted for each drafter over all requests: by the drafter's own probability where it gives one, else by depth. For each request a
bias in log-odds is learned on top, because some texts are easier than others: logistic regression with one weight, fitted online.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PRIOR_RATE = 0.6  # acceptance rate of a drafter before any token was verified
PRIOR_WEIGHT, DEEPER_PRIOR_WEIGHT = 4.0, 12.0  # tokens that priors count for: at depth 1 and by probability, and at greater depths
RATE_MEMORY = 512.0  # tokens after which older ones count half
BIAS_PRIOR_WEIGHT, BIAS_MEMORY = 12.0, 64.0
BIAS_STEP = 5.0  # 1 / (p * (1 - p)) of a rate that is neither small nor great: Newton's step
MAX_BIAS = 6.0
SURPRISE = 0.06  # an outcome that was less likely resets the memory of a request's bias: its text has changed
MIN_RATE, MAX_RATE = 0.004, 0.995
SIBLING_FACTOR = 0.3  # rate of a later sibling over the one before it, where the drafter gives no probabilities
FORCED_RATE = 0.98  # of tokens that a grammar forces: the model may spell the same text in other tokens


class UnsentDraft(NamedTuple):
    """A draft that was not worth its rows. The text shows later whether it was right, which costs nothing.

    Attributes:
        num_tokens: length of the request when it was drafted.
        token_ids: the draft.
        probs: of its tokens; None = the drafter gives none.
    """

    num_tokens: int
    token_ids: Sequence[int]
    probs: Sequence[float] | None


@dataclass(slots=True)
class AcceptanceRates:
    """Rates of one drafter over all requests.

    Attributes:
        num_observed: verified tokens.
        has_probs: the drafter gives probabilities.
    """

    num_observed: int = 0
    has_probs: bool = False
    _counts: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)  # (verified, accepted) by depth and by log-odds

    def by_depth(self, count: int) -> list[float]:
        """Rates at depths 1 to `count`; a depth that was seen seldom resembles the one before it."""
        rates, rate, weight = list[float](), PRIOR_RATE, PRIOR_WEIGHT
        for depth in range(1, count + 1):
            verified, accepted = self._counts.get(("depth", depth), (0.0, 0.0))
            rate, weight = (accepted + weight * rate) / (verified + weight), DEEPER_PRIOR_WEIGHT
            rates.append(rate)
        return rates

    def by_prob(self, prob: float, *, is_first: bool = True) -> float:
        """The rate of tokens of about this probability. Later siblings (`is_first` False) are counted apart."""
        verified, accepted = self._counts.get(_prob_key(prob, is_first=is_first), (0.0, 0.0))
        return (accepted + PRIOR_WEIGHT * prob) / (verified + PRIOR_WEIGHT)

    def observe(self, depth: int, prob: float | None, *, is_first: bool, accepted: bool) -> None:
        """Count a verified token."""
        self.num_observed += 1
        if is_first:
            self._count(("depth", depth), accepted=accepted)
        if prob is not None:
            self.has_probs = True
            self._count(_prob_key(prob, is_first=is_first), accepted=accepted)

    @property
    def optimism(self) -> float:
        """One standard deviation of the log-odds at depth 1. Added to rates when a draft is planned, so that few samples do not stop it."""
        verified, _ = self._counts.get(("depth", 1), (0.0, 0.0))
        rate = clip(self.by_depth(1)[0])
        return 1.0 / math.sqrt((verified + PRIOR_WEIGHT) * rate * (1.0 - rate))

    def _count(self, key: tuple[str, int], *, accepted: bool) -> None:
        verified, num_accepted = self._counts.get(key, (0.0, 0.0))
        keep = 0.5 if verified >= RATE_MEMORY else 1.0
        self._counts[key] = keep * verified + 1.0, keep * num_accepted + accepted


@dataclass(slots=True)
class DraftHistory:
    """Acceptance and backoff of one drafter for one request.

    Attributes:
        bias: log-odds by which its tokens are accepted more often than those of other requests.
        num_observed: tokens that the bias was learned from, at most `BIAS_MEMORY`.
        backoff_level: times in a row that drafting did not pay.
        resume_step: step of the engine at which it is considered again.
        unsent: the last draft that was not sent, until the text has passed it.
    """

    bias: float = 0.0
    num_observed: float = 0.0
    backoff_level: int = 0
    resume_step: int = 0
    unsent: UnsentDraft | None = None

    def rate(self, rate: float, optimism: float = 0.0) -> float:
        """This request's rate, from that over all requests."""
        rate = clip(rate)
        odds = rate / (1.0 - rate) * math.exp(self.bias + optimism)
        return clip(odds / (1.0 + odds))

    def path_rates(self, rates: Sequence[float], min_rate: float, optimism: float = 0.0) -> list[float]:
        """Chances that a chain is accepted up to depth 1, 2, …, as far as they are at least `min_rate`."""
        chance, found = 1.0, list[float]()
        for rate in rates:
            chance *= self.rate(rate, optimism)
            if chance < min_rate:
                break
            found.append(chance)
        return found

    def observe(self, rate: float, *, accepted: bool) -> None:
        """Update the bias with a verified token, given its acceptance rate over all requests."""
        expected = self.rate(rate)
        if (expected if accepted else 1.0 - expected) < SURPRISE:
            self.num_observed = 0.0
        self.num_observed = min(self.num_observed + 1.0, BIAS_MEMORY)
        step = BIAS_STEP / (BIAS_PRIOR_WEIGHT + self.num_observed)
        self.bias = min(max(self.bias + step * (accepted - expected), -MAX_BIAS), MAX_BIAS)


def clip(rate: float) -> float:
    """A rate that is neither certain nor impossible."""
    return MIN_RATE if rate < MIN_RATE else min(rate, MAX_RATE)


def match_confidence(match_len: int, count: int) -> list[float]:
    """Probabilities for `count` tokens copied from where the last `match_len` tokens occurred before: they grow with the match."""
    return [1.0 - 1.0 / (2.0 + length) for length in range(match_len, match_len + count)]


def _prob_key(prob: float, *, is_first: bool) -> tuple[str, int]:
    """Probabilities are counted in bins of half a unit of log-odds."""
    prob = clip(prob)
    return "first" if is_first else "sibling", round(2.0 * math.log(prob / (1.0 - prob)))
