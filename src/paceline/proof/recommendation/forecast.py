"""From an assumed acceptance and measured costs to a speedup."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.proof.recommendation.assumptions import Acceptance


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds a draft takes: so many for each guess, and so many however long it is."""

    per_guess_s: float
    per_draft_s: float

    def seconds(self, num_draft_tokens: int) -> float:
        """Of a draft of so many tokens."""
        return self.per_draft_s + num_draft_tokens * self.per_guess_s


@dataclass(frozen=True, slots=True)
class Expectation:
    """What one chance of acceptance brings at the best draft length.

    Attributes:
        num_draft_tokens: guesses a step; 0 = drafting does not pay, steps are plain.
        tokens_per_step: with the target's own.
    """

    chance: float
    num_draft_tokens: int
    tokens_per_step: float
    speedup: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "chance": self.chance,
            "num_draft_tokens": self.num_draft_tokens,
            "tokens_per_step": self.tokens_per_step,
            "speedup": self.speedup,
        }


@dataclass(frozen=True, slots=True)
class Forecast:
    """Between which speedups a drafter will lie, if its acceptance lies in the assumed range."""

    low: Expectation
    high: Expectation
    cost: DraftCost

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        per_guess_ms, per_draft_ms = 1e3 * self.cost.per_guess_s, 1e3 * self.cost.per_draft_s
        return {"low": self.low.as_dict(), "high": self.high.as_dict(), "per_guess_ms": per_guess_ms, "per_draft_ms": per_draft_ms}


def forecast(acceptance: Acceptance, cost: DraftCost, pass_s: Mapping[int, float]) -> Forecast:
    """What a drafter brings at both ends of its assumed acceptance.

    Args:
        pass_s: seconds of a target pass by rows: 1, and the draft lengths + 1.
    """
    return Forecast(_best(acceptance.low, cost, pass_s), _best(acceptance.high, cost, pass_s), cost)


def _best(chance: float, cost: DraftCost, pass_s: Mapping[int, float]) -> Expectation:
    """Source: Leviathan et al. 2023, arXiv:2211.17192, section 3.3, with measured pass times instead of equal ones."""
    best = Expectation(chance, 0, 1.0, 1.0)
    for rows, verify_s in pass_s.items():
        if rows == 1:
            continue
        tokens = 1.0 + _expected_accepted(chance, rows - 1)
        speedup = tokens * pass_s[1] / (verify_s + cost.seconds(rows - 1))
        if speedup > best.speedup:
            best = Expectation(chance, rows - 1, tokens, speedup)
    return best


def _expected_accepted(rate: float, depth: float) -> float:
    """Tokens accepted of a chain, each with this rate once those before it are."""
    return depth if rate == 1.0 else rate * (1.0 - rate**depth) / (1.0 - rate)
