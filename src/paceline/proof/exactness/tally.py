"""Counting what was compared, in all and by each level of what was combined."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.proof.exactness.case_run import Answered, CaseOutcome
from paceline.proof.exactness.covering import Factors
from paceline.proof.exactness.findings import Status


@dataclass(slots=True)
class Counts:
    """What was compared in some cases.

    Attributes:
        requests: answers compared.
        tokens: output tokens compared.
        rows: rows of logits compared.
        num_draft_tokens, num_accepted_tokens: guesses in these answers, and those that were kept.
        cached_tokens: prompt tokens whose rows were found in the cache.
        near_ties, bugs: answers that differ.
    """

    requests: int = 0
    tokens: int = 0
    rows: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    cached_tokens: int = 0
    near_ties: int = 0
    bugs: int = 0

    def add(self, answered: Answered) -> None:
        """Count one answer."""
        self.requests += 1
        self.tokens += answered.compared.num_tokens
        self.rows += answered.compared.num_rows
        self.num_draft_tokens += answered.output.speculation.num_draft_tokens
        self.num_accepted_tokens += answered.output.speculation.num_accepted_tokens
        self.cached_tokens += answered.output.usage.num_cached_tokens
        if answered.compared.finding is not None:
            self.count(answered.compared.finding.status)

    def count(self, status: Status) -> None:
        """Count a difference."""
        if status is Status.BUG:
            self.bugs += 1
        else:
            self.near_ties += 1

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(slots=True)
class Tally:
    """Counts of all cases.

    Attributes:
        by: the counts of each level of each factor.
    """

    cases: int = 0
    preemptions: int = 0
    all: Counts = field(default_factory=Counts)
    by: dict[str, dict[str, Counts]] = field(default_factory=dict)

    @classmethod
    def of(cls, factors: Factors) -> "Tally":
        """Nothing counted yet, with every level in its order, so that what was never run shows."""
        return cls(by={name: {level: Counts() for level in levels} for name, levels in factors.items()})

    def add(self, outcome: CaseOutcome) -> None:
        """Count a case."""
        self.cases += 1
        self.preemptions += outcome.num_preemptions
        for answered in outcome.answered:
            for counts in (self.all, *self._levels(outcome, answered)):
                counts.add(answered)
        of_answers = {id(one.compared.finding) for one in outcome.answered}
        for finding in outcome.findings:
            if id(finding) not in of_answers:
                self.all.count(finding.status)

    def _levels(self, outcome: CaseOutcome, answered: Answered) -> list[Counts]:
        setting, request = outcome.case.setting, answered.request
        levels = {
            "drafter": request.drafter,
            "num_speculative_tokens": setting.num_speculative_tokens,
            "shape": setting.shape,
            "batch": str(setting.batch),
            "event": setting.event,
            "sampling": request.sampling,
            "prompt": request.prompt,
        }
        return [self.by.setdefault(name, {}).setdefault(level, Counts()) for name, level in levels.items()]

    def as_dict(self) -> Mapping[str, Any]:
        """For JSON."""
        by = {name: {level: counts.as_dict() for level, counts in levels.items()} for name, levels in self.by.items()}
        return {"cases": self.cases, "preemptions": self.preemptions, **self.all.as_dict(), "by": by}
