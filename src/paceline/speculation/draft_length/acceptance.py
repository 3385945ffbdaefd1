"""Acceptance model: the probability that a draft token is accepted, given that all tokens before it in the draft are.

    acceptance rate of a token = sigmoid(logit(rate over all requests) + bias of the request)

The rate over all requests is counted for each drafter: by the drafter's own probability of the token if it gives one, otherwise by depth.
The bias is learned for each request, because some texts are easier to draft than others (logistic regression with one weight, online).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.speculation.tree import DraftTree

PRIOR_RATE = 0.6  # acceptance rate of a drafter before any token was verified
PRIOR_WEIGHT, DEEPER_PRIOR_WEIGHT = 4.0, 12.0  # number of tokens that priors count for: by probability and at depth 1; at greater depths
RATE_MEMORY = 512.0  # number of newer tokens after which older ones count half
BIAS_PRIOR_WEIGHT, BIAS_MEMORY = 12.0, 64.0  # number of tokens that a bias of 0 counts for, and that the bias remembers at most
BIAS_STEP = 5.0  # step of Newton's method for the bias: 1 / (p * (1 - p)) at p = 0.28 or 0.72
MAX_BIAS = 6.0
SURPRISE = 0.06  # an outcome with a lower probability resets the memory of the bias, because the text has probably changed
MIN_RATE, MAX_RATE = 0.004, 0.995  # bounds of acceptance rates: no token is certain or impossible
SIBLING_FACTOR = 0.3  # rate of a sibling relative to the one before it, if the drafter gives no probabilities
FORCED_RATE = 0.98  # acceptance rate of tokens forced by a grammar: the model may tokenize the same text differently


@dataclass(slots=True)
class AcceptanceRates:
    """Acceptance rates of one drafter over all requests.

    Attributes:
        num_observed: number of verified tokens.
        has_probs: whether the drafter gives probabilities.
    """

    num_observed: int = 0
    has_probs: bool = False
    _counts: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)  # (verified, accepted), by depth and by probability

    def rates_by_depth(self, count: int) -> list[float]:
        """Return the rates at depths 1 to `count`. The prior of a depth is the rate of the one before it."""
        rates, rate, weight = list[float](), PRIOR_RATE, PRIOR_WEIGHT
        for depth in range(1, count + 1):
            verified, accepted = self._counts.get(("depth", depth), (0.0, 0.0))
            rate, weight = (accepted + weight * rate) / (verified + weight), DEEPER_PRIOR_WEIGHT
            rates.append(rate)
        return rates

    def rate_by_prob(self, prob: float, *, is_first: bool = True) -> float:
        """Return the rate of tokens of about this probability. Siblings after the first one are counted separately."""
        verified, accepted = self._counts.get(_prob_key(prob, is_first=is_first), (0.0, 0.0))
        return (accepted + PRIOR_WEIGHT * prob) / (verified + PRIOR_WEIGHT)

    def observe(self, depth: int, prob: float | None, *, is_first: bool, accepted: bool) -> None:
        """Count a verified token."""
        self.num_observed += 1
        if is_first:
            self._add_outcome(("depth", depth), accepted=accepted)
        if prob is not None:
            self.has_probs = True
            self._add_outcome(_prob_key(prob, is_first=is_first), accepted=accepted)

    @property
    def optimism(self) -> float:
        """Standard deviation of the log-odds at depth 1. Drafts are planned with rates raised by it, so that a few rejected
        tokens do not stop drafting."""
        verified, _ = self._counts.get(("depth", 1), (0.0, 0.0))
        rate = clip_rate(self.rates_by_depth(1)[0])
        return 1.0 / math.sqrt((verified + PRIOR_WEIGHT) * rate * (1.0 - rate))

    def _add_outcome(self, key: tuple[str, int], *, accepted: bool) -> None:
        verified, num_accepted = self._counts.get(key, (0.0, 0.0))
        keep = 0.5 if verified >= RATE_MEMORY else 1.0
        self._counts[key] = keep * verified + 1.0, keep * num_accepted + accepted


@dataclass(slots=True)
class DraftHistory:
    """Acceptance and backoff of one drafter for one request.

    Attributes:
        bias: log-odds that are added to the rates over all requests.
        num_observed: number of tokens that the bias was learned from, at most `BIAS_MEMORY`.
        backoff_level: number of times in a row that drafting did not pay.
        resume_step: number of the step from which on it may draft again.
        unsent: a draft that was dropped before the pass, and the length of the request then. It is compared with the text later, which
            costs no row. None = there is none.
    """

    bias: float = 0.0
    num_observed: float = 0.0
    backoff_level: int = 0
    resume_step: int = 0
    unsent: tuple[int, DraftTree] | None = None

    def request_rate(self, rate: float, optimism: float = 0.0) -> float:
        """Return the request's acceptance rate, given the rate over all requests. `optimism`: log-odds that are added to the bias."""
        rate = clip_rate(rate)
        odds = rate / (1.0 - rate) * math.exp(self.bias + optimism)
        return clip_rate(odds / (1.0 + odds))

    def path_rates(self, rates: Sequence[float], min_rate: float, optimism: float = 0.0) -> list[float]:
        """Return the probabilities that a chain is accepted up to depth 1, 2, …, as far as they are at least `min_rate`."""
        prob, found = 1.0, list[float]()
        for rate in rates:
            prob *= self.request_rate(rate, optimism)
            if prob < min_rate:
                break
            found.append(prob)
        return found

    def observe(self, rate: float, *, accepted: bool) -> None:
        """Update the bias with a verified token whose rate over all requests is `rate`."""
        expected = self.request_rate(rate)
        if (expected if accepted else 1.0 - expected) < SURPRISE:
            self.num_observed = 0.0
        self.num_observed = min(self.num_observed + 1.0, BIAS_MEMORY)
        step = BIAS_STEP / (BIAS_PRIOR_WEIGHT + self.num_observed)
        self.bias = min(max(self.bias + step * (accepted - expected), -MAX_BIAS), MAX_BIAS)


def clip_rate(rate: float) -> float:
    """Return the nearest rate in [`MIN_RATE`, `MAX_RATE`]."""
    return MIN_RATE if rate < MIN_RATE else min(rate, MAX_RATE)


def match_confidence(match_len: int, count: int) -> list[float]:
    """Return probabilities of `count` tokens copied from after an earlier occurrence of the last `match_len` tokens.

    They grow with the length of the match, copied tokens included.
    """
    return [1.0 - 1.0 / (2.0 + length) for length in range(match_len, match_len + count)]


def _prob_key(prob: float, *, is_first: bool) -> tuple[str, int]:
    """Return the key of a probability in `_counts`: bins are half a unit of log-odds wide."""
    prob = clip_rate(prob)
    return "first" if is_first else "sibling", round(2.0 * math.log(prob / (1.0 - prob)))
