"""What is said: drafters that are recommended, with their reasons, and those that are not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from paceline.proof.recommendation.assumptions import Acceptance
from paceline.proof.recommendation.costs import MachineCosts
from paceline.proof.recommendation.forecast import Forecast


class Place(Enum):
    """Where a drafter is."""

    OWN = "own"  # in the model's own files
    HERE = "here"
    BUILT_IN = "built in"  # it needs no files
    HUB = "hub"  # to be downloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """One drafter.

    Attributes:
        drafter: what `--drafter` takes.
        command: that uses it.
        parameters: of its own network; None = it has none, or they are not published.
        memory_bytes: it takes once it is loaded, its cache of 1000 tokens included.
        verdict: what doctor says of the pair; for drafters that are not here, what the table says.
        forecast: None where nothing was measured, or its size is not known.
        losses: what it costs beside time.
    """

    drafter: str
    method: str
    place: Place
    command: str
    acceptance: Acceptance
    verdict: str
    parameters: float | None = None
    memory_bytes: float | None = None
    forecast: Forecast | None = None
    losses: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "drafter": self.drafter,
            "method": self.method,
            "place": self.place.value,
            "command": self.command,
            "parameters": self.parameters,
            "memory_bytes": self.memory_bytes,
            "verdict": self.verdict,
            "assumed_acceptance": {"low": self.acceptance.low, "high": self.acceptance.high, "source": self.acceptance.source},
            "forecast": None if self.forecast is None else self.forecast.as_dict(),
            "losses": list(self.losses),
        }


@dataclass(frozen=True, slots=True)
class Rejection:
    """A drafter that is here and is not recommended, and why."""

    drafter: str
    why: str


@dataclass(slots=True)
class Advice:
    """Everything that was found; `problems` are reasons why the model itself cannot be run here.

    Attributes:
        names: the model goes by, in the tables.
        target: its facts, as doctor tells them; None = it is not here.
        costs: None = nothing was measured.
        recommendations: best first.
    """

    model: str
    names: tuple[str, ...] = ()
    target: Mapping[str, Any] | None = None
    costs: MachineCosts | None = None
    recommendations: list[Recommendation] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        costs = self.costs
        passes = None if costs is None else {str(rows): 1e3 * seconds for rows, seconds in costs.pass_s.items()}
        return {
            "model": self.model,
            "names": list(self.names),
            "target": self.target,
            "pass_ms_by_rows": passes,
            "read_gb_per_s": None if costs is None else costs.bytes_per_s / 1e9,
            "recommendations": [one.as_dict() for one in self.recommendations],
            "not_recommended": [{"drafter": one.drafter, "why": one.why} for one in self.rejections],
            "notes": self.notes,
            "problems": self.problems,
        }


def best_first(recommendations: Sequence[Recommendation]) -> list[Recommendation]:
    """By the low end of the predicted speedup, then by the high one; behind them, by assumption, what nothing could be predicted of."""

    def worth(one: Recommendation) -> tuple[bool, float, float]:
        if one.forecast is None:
            return False, one.acceptance.low, one.acceptance.high
        return True, round(one.forecast.low.speedup, 2), one.forecast.high.speedup

    return sorted(recommendations, key=worth, reverse=True)
