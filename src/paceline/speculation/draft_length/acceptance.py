"""Acceptance model: the probability that a draft token is accepted, given that all tokens before it in the draft are.

    acceptance rate of a token = sigmoid(logit(rate over all requests) + log_odds_offset of the request)

The rate over all requests is counted for each drafter: by the drafter's own probability of the token if it gives one, otherwise by depth.
The offset is learned for each request, because some texts are easier to draft than others (online logistic regression with one weight).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.speculation.tree import DraftTree

PRIOR_RATE = 0.6  # assumed acceptance rate of a drafter until one of its tokens was verified
PRIOR_WEIGHT = 4.0  # PRIOR_RATE counts as this many verified tokens, at depth 1 and in each range of confidences
DEEPER_PRIOR_WEIGHT = 12.0  # at depths above 1, the rate at the previous depth counts as this many verified tokens
MAX_COUNTED_TOKENS = 512.0  # at this many verified tokens, the counts are halved, so that recent tokens weigh more
OFFSET_PRIOR_WEIGHT = 12.0  # the assumption that a request is as easy to draft as others counts as this many verified tokens
MAX_OFFSET_TOKENS = 64.0  # at most this many verified tokens count in the offset of a request, so that it keeps adapting
OFFSET_LEARNING_RATE = 5.0  # learning rate of a request's offset: 1 / (p * (1 - p)) in Newton's method, here for p = 0.28 or 0.72
MAX_LOG_ODDS_OFFSET = 6.0
MIN_OUTCOME_PROB = 0.06  # if a token's acceptance or rejection was less probable, the text has changed: earlier tokens lose weight
MIN_RATE, MAX_RATE = 0.004, 0.995  # bounds of acceptance rates: no token is certain or impossible
SIBLING_RATE_FACTOR = 0.3  # factor from a child's acceptance rate to its next sibling's, for drafters without probabilities
FORCED_TOKEN_RATE = 0.98  # rate of tokens forced by a grammar; below 1 because the model may produce the same text with other tokens


@dataclass(slots=True)
class AcceptanceRates:
    """Acceptance rates of one drafter over all requests."""

    num_observed: int = 0  # number of verified tokens
    has_probs: bool = False  # whether the drafter gives probabilities
    _counts: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    """Numbers of verified and accepted tokens, by ("depth", depth) and by `_prob_key`."""

    def rates_by_depth(self, count: int) -> list[float]:
        """Return the rates at depths 1 to `count`. The prior of a depth is the rate of the previous depth."""
        rates, rate, weight = list[float](), PRIOR_RATE, PRIOR_WEIGHT
        for depth in range(1, count + 1):
            verified, accepted = self._counts.get(("depth", depth), (0.0, 0.0))
            rate, weight = (accepted + weight * rate) / (verified + weight), DEEPER_PRIOR_WEIGHT
            rates.append(rate)
        return rates

    def rate_by_prob(self, prob: float, *, is_first_child: bool = True) -> float:
        """Return the acceptance rate of tokens with about this probability. First children and later siblings have separate rates."""
        verified, accepted = self._counts.get(_prob_key(prob, is_first_child=is_first_child), (0.0, 0.0))
        return (accepted + PRIOR_WEIGHT * prob) / (verified + PRIOR_WEIGHT)

    def observe(self, depth: int, prob: float | None, *, is_first_child: bool, accepted: bool) -> None:
        """Count a verified token, whose probability under the drafter was `prob`; None = unknown."""
        self.num_observed += 1
        if is_first_child:
            self._add_outcome(("depth", depth), accepted=accepted)
        if prob is not None:
            self.has_probs = True
            self._add_outcome(_prob_key(prob, is_first_child=is_first_child), accepted=accepted)

    @property
    def optimism(self) -> float:
        """Standard deviation of the log-odds of acceptance at depth 1. Planning adds it, so that a few rejections do not stop drafting."""
        verified, _ = self._counts.get(("depth", 1), (0.0, 0.0))
        rate = clip_rate(self.rates_by_depth(1)[0])
        return 1.0 / math.sqrt((verified + PRIOR_WEIGHT) * rate * (1.0 - rate))

    def _add_outcome(self, key: tuple[str, int], *, accepted: bool) -> None:
        verified, num_accepted = self._counts.get(key, (0.0, 0.0))
        factor = 0.5 if verified >= MAX_COUNTED_TOKENS else 1.0
        self._counts[key] = factor * verified + 1.0, factor * num_accepted + accepted


@dataclass(slots=True)
class DraftHistory:
    """Acceptance of one drafter for one request, and the drafter's backoff while drafting is unprofitable."""

    log_odds_offset: float = 0.0  # added to the log-odds of the rates over all requests
    num_verified_tokens: float = 0.0  # number of tokens that the offset was learned from, at most `MAX_OFFSET_TOKENS`
    backoff_level: int = 0  # number of times in a row that drafting was unprofitable
    resume_step: int = 0  # index of the first step in which the drafter may draft again
    unsent_draft: tuple[int, DraftTree] | None = None  # number of tokens when a draft was last dropped, and that draft

    def rate_for_request(self, rate: float, optimism: float = 0.0) -> float:
        """Return the request's acceptance rate, given the rate over all requests. `optimism` is added to the offset."""
        rate = clip_rate(rate)
        odds = rate / (1.0 - rate) * math.exp(self.log_odds_offset + optimism)
        return clip_rate(odds / (1.0 + odds))

    def path_rates(self, rates: Sequence[float], min_rate: float, optimism: float = 0.0) -> list[float]:
        """Return the probabilities that a chain is accepted up to depth 1, 2, …, without those below `min_rate`. `rates`: by depth."""
        prob, path_rates = 1.0, list[float]()
        for rate in rates:
            prob *= self.rate_for_request(rate, optimism)
            if prob < min_rate:
                break
            path_rates.append(prob)
        return path_rates

    def observe(self, rate: float, *, accepted: bool) -> None:
        """Update the offset with a verified token whose rate over all requests is `rate`."""
        expected = self.rate_for_request(rate)
        if (expected if accepted else 1.0 - expected) < MIN_OUTCOME_PROB:
            self.num_verified_tokens = 0.0
        self.num_verified_tokens = min(self.num_verified_tokens + 1.0, MAX_OFFSET_TOKENS)
        step = OFFSET_LEARNING_RATE / (OFFSET_PRIOR_WEIGHT + self.num_verified_tokens)
        self.log_odds_offset = min(max(self.log_odds_offset + step * (accepted - expected), -MAX_LOG_ODDS_OFFSET), MAX_LOG_ODDS_OFFSET)


def clip_rate(rate: float) -> float:
    """Clamp a rate to [`MIN_RATE`, `MAX_RATE`]."""
    return MIN_RATE if rate < MIN_RATE else min(rate, MAX_RATE)


def match_confidence(match_len: int, count: int) -> list[float]:
    """Return the confidence of a lookup drafter in each of `count` tokens that follow an earlier occurrence of the last `match_len` tokens.

    The confidence grows from token to token, because each copied token lengthens the match for later tokens.
    """
    return [1.0 - 1.0 / (2.0 + length) for length in range(match_len, match_len + count)]


def _prob_key(prob: float, *, is_first_child: bool) -> tuple[str, int]:
    """Return the key of a probability in `_counts`: the nearest multiple of 0.5 of its log-odds."""
    prob = clip_rate(prob)
    return "first" if is_first_child else "sibling", round(2.0 * math.log(prob / (1.0 - prob)))
