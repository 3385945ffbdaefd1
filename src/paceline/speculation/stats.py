"""Statistics of speculation: counters of requests, and records of single steps. Tokens dropped after a finish do not count.

mean_acceptance_length = num_emitted_tokens / steps        (1 for plain decoding)
acceptance_rate        = num_accepted_tokens / num_draft_tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any


class SkipReason(StrEnum):
    """Why a step ran without a draft. The value is the identifier in JSON, metrics and logs."""

    description: str

    def __new__(cls, value: str, description: str) -> "SkipReason":
        reason = str.__new__(cls, value)
        reason._value_, reason.description = value, description
        return reason

    OFF = "off", "speculation is off"
    PROMPT = "prompt", "the prompt's last pass"
    RESUMED = "resumed", "the last pass over tokens whose cache rows had been evicted"
    NO_MATCH = "no_match", "no drafter had a draft"
    UNPROFITABLE = "unprofitable", "drafting was not expected to pay"
    NO_ROOM = "no_room", "the end of the context or of max_tokens"
    PASS_FULL = "pass_full", "the pass was full of other rows"
    NO_MEMORY = "no_memory", "no cache block was free for draft tokens"
    DRAFTER_FAILED = "drafter_failed", "the drafter failed"
    UNUSABLE = "unusable", "no drafted token was usable"


class SkipCounts(dict[SkipReason, int]):
    """Number of plain steps by reason, 0 for a reason that did not occur. Not a `Counter`, which `dataclasses.asdict` cannot copy."""

    def __missing__(self, reason: SkipReason) -> int:
        return 0


@dataclass(slots=True)
class SpeculationStats:
    """Counters of one request, or of several requests together.

    Attributes:
        steps: number of target passes that emitted tokens.
        num_draft_tokens: number of draft tokens that the target verified.
        num_accepted_tokens: number of draft tokens that were accepted.
        num_emitted_tokens: number of tokens that the steps emitted.
        num_dropped_tokens: number of draft tokens that were dropped before the pass: invalid, too deep, over budget, or no memory.
        num_draft_tokens_by_position, num_accepted_tokens_by_position: the counts by depth in the draft, from depth 1.
        skip_counts: number of plain steps by reason.
        acceptance: rule that accepts draft tokens: "match" or "rejection" (speculation/rejection.py).
    """

    steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_dropped_tokens: int = 0
    num_draft_tokens_by_position: list[int] = field(default_factory=list)
    num_accepted_tokens_by_position: list[int] = field(default_factory=list)
    skip_counts: SkipCounts = field(default_factory=SkipCounts)
    acceptance: str = "match"

    @property
    def num_bonus_tokens(self) -> int:
        """Number of emitted tokens that are not accepted draft tokens: one a step. The token that finishes a request counts
        as a bonus token even if it was drafted."""
        return self.num_emitted_tokens - self.num_accepted_tokens

    @property
    def plain_steps(self) -> int:
        """Number of steps without a draft."""
        return sum(self.skip_counts.values())

    @property
    def mean_acceptance_length(self) -> float:
        return self.num_emitted_tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_rate_by_position(self) -> list[float]:
        """Acceptance rate at depth 1, 2, …"""
        counts = zip(self.num_accepted_tokens_by_position, self.num_draft_tokens_by_position, strict=True)
        return [accepted / max(1, drafted) for accepted, drafted in counts]

    def record(self, draft_depths: Sequence[int], num_accepted: int, num_emitted: int, skip_reason: SkipReason | None) -> None:
        """Count one step. `draft_depths`: depth of each draft token."""
        self.steps += 1
        self.num_draft_tokens += len(draft_depths)
        self.num_accepted_tokens += num_accepted
        self.num_emitted_tokens += num_emitted
        if skip_reason is not None:
            self.skip_counts[skip_reason] += 1
        if draft_depths:
            self._extend_positions(max(draft_depths))
        for depth in draft_depths:
            self.num_draft_tokens_by_position[depth - 1] += 1
        for index in range(num_accepted):
            self.num_accepted_tokens_by_position[index] += 1

    def add(self, other: "SpeculationStats") -> None:
        """Add the counters of another request."""
        self._extend_positions(len(other.num_draft_tokens_by_position))
        for counter in fields(self):
            value, added = getattr(self, counter.name), getattr(other, counter.name)
            if isinstance(value, int):
                setattr(self, counter.name, value + added)
            elif isinstance(value, list):
                value[: len(added)] = map(int.__add__, value, added)
        for reason, count in other.skip_counts.items():
            self.skip_counts[reason] += count

    def as_dict(self) -> dict[str, Any]:
        """Return the values as a JSON object."""
        return {
            "acceptance": self.acceptance,
            "steps": self.steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_bonus_tokens": self.num_bonus_tokens,
            "num_emitted_tokens": self.num_emitted_tokens,
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "acceptance_rate_by_position": [round(rate, 4) for rate in self.acceptance_rate_by_position],
            "plain_steps": self.plain_steps,
            "skip_counts": {reason.value: count for reason, count in self.skip_counts.items()},
        }

    def _extend_positions(self, depth: int) -> None:
        for counts in (self.num_draft_tokens_by_position, self.num_accepted_tokens_by_position):
            counts.extend([0] * (depth - len(counts)))


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Draft and outcome of one step of one request. Node 0 of its tree is the last token before the step; nodes 1 … n are the draft.

    Attributes:
        start: index of the first emitted token among the request's output tokens.
        token_ids: emitted tokens: those of the accepted nodes, then the bonus token.
        draft_token_ids: [n] draft tokens.
        parents: [n] parent node of each draft token.
        sources: [n] name of the drafter of each draft token.
        accepted_nodes: accepted nodes, from depth 1 down.
        skip_reason: why there is no draft; None if there is one.
        expected_tokens: number of tokens that the step was expected to emit when the draft was chosen; None = unknown.
        expected_speedup: expected speedup of the whole step over one without drafts; for a plain step, the speedup of the best draft.
    """

    start: int
    token_ids: tuple[int, ...]
    draft_token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    accepted_nodes: tuple[int, ...] = ()
    skip_reason: SkipReason | None = None
    expected_tokens: float | None = None
    expected_speedup: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the values as a JSON object."""
        values: dict[str, Any] = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        for name, value in values.items():
            if isinstance(value, tuple):
                values[name] = list(value)
            elif isinstance(value, float):
                values[name] = round(value, 3)
        return {**values, "skip_reason": self.skip_reason and self.skip_reason.value}
