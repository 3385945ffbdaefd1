"""What speculation did, counted after the stop cut.

steps: target passes that emitted. drafted: draft tokens, roots excluded. accepted: draft tokens accepted. emitted: tokens of those steps;
emitted = accepted + bonus. mean_acceptance_length = emitted / steps (plain decoding = 1). acceptance_rate = accepted / drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class SkipReason(StrEnum):
    """Why a step ran without a draft. The value is the identifier in JSON, metrics and logs."""

    OFF = "off"
    PROMPT = "prompt"
    RESUMED = "resumed"
    NO_MATCH = "no_match"
    UNPROFITABLE = "unprofitable"
    NO_ROOM = "no_room"
    PASS_FULL = "pass_full"
    NO_MEMORY = "no_memory"
    DRAFTER_FAILED = "drafter_failed"
    UNUSABLE = "unusable"

    @property
    def description(self) -> str:
        """The reason in words."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    SkipReason.OFF: "speculation is off",
    SkipReason.PROMPT: "the prompt's last pass",
    SkipReason.RESUMED: "the last pass over tokens whose cache rows had been evicted",
    SkipReason.NO_MATCH: "no drafter had a draft",
    SkipReason.UNPROFITABLE: "drafting was not expected to pay",
    SkipReason.NO_ROOM: "the end of the context or of max_tokens",
    SkipReason.PASS_FULL: "the pass was full of other rows",
    SkipReason.NO_MEMORY: "no cache block was free for draft tokens",
    SkipReason.DRAFTER_FAILED: "the drafter failed",
    SkipReason.UNUSABLE: "no drafted token was usable",
}


class SkipCounts(dict[SkipReason, int]):
    """Steps by reason, 0 for a reason that did not occur. A `Counter` would come out wrong of `dataclasses.asdict`."""

    def __missing__(self, reason: SkipReason) -> int:
        return 0


@dataclass(slots=True)
class SpeculationStats:
    """Counts steps and draft tokens of one request, or of several requests together.

    `acceptance` is the rule that accepts draft tokens: "match" or "rejection" (speculation/rejection.py).
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    bonus: int = 0
    emitted: int = 0
    cut: int = 0  # draft tokens dropped before the pass: ids out of range, too deep, over budget
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    plain: SkipCounts = field(default_factory=SkipCounts)
    acceptance: str = "match"

    @property
    def plain_steps(self) -> int:
        return sum(self.plain.values())

    @property
    def mean_acceptance_length(self) -> float:
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_rate_by_position(self) -> list[float]:
        """Accepted / drafted at depth 1, 2, …"""
        return [kept / max(1, drafted) for kept, drafted in zip(self.accepted_by_position, self.drafted_by_position, strict=True)]

    def record(self, draft_depths: Sequence[int], num_accepted: int, num_emitted: int, plain: SkipReason | None) -> None:
        """Count one step. `draft_depths`: depth of each draft token; `num_accepted` and `num_emitted`: after the stop cut."""
        self.steps += 1
        self.drafted += len(draft_depths)
        self.accepted += num_accepted
        self.bonus += num_emitted - num_accepted
        self.emitted += num_emitted
        if plain is not None:
            self.plain[plain] += 1
        if not draft_depths:
            return
        self._widen(max(draft_depths))
        for depth in draft_depths:
            self.drafted_by_position[depth - 1] += 1
        for depth in range(num_accepted):
            self.accepted_by_position[depth] += 1

    def add(self, other: "SpeculationStats") -> None:
        """Add another request's counters to these."""
        for name in ("steps", "drafted", "accepted", "bonus", "emitted", "cut"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._widen(len(other.drafted_by_position))
        for depth, (drafted, accepted) in enumerate(zip(other.drafted_by_position, other.accepted_by_position, strict=True)):
            self.drafted_by_position[depth] += drafted
            self.accepted_by_position[depth] += accepted
        for reason, count in other.plain.items():
            self.plain[reason] += count

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "acceptance": self.acceptance,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "bonus": self.bonus,
            "emitted": self.emitted,
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "acceptance_rate_by_position": [round(rate, 4) for rate in self.acceptance_rate_by_position],
            "plain_steps": self.plain_steps,
            "plain": {reason.value: count for reason, count in self.plain.items()},
        }

    def _widen(self, depth: int) -> None:
        missing = depth - len(self.drafted_by_position)
        self.drafted_by_position.extend([0] * missing)
        self.accepted_by_position.extend([0] * missing)
