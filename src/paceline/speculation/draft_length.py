"""How much to draft. Decisions are pure functions of counts and costs; they change speed, never tokens."""

import statistics
from collections import deque
from dataclasses import dataclass

from paceline.speculation.drafter import DraftBudget
from paceline.speculation.request import Request

WINDOW = 64  # drafted tokens the guard looks back on
MIN_EVIDENCE = 24  # drafted tokens before it may act
CLEAR_EVIDENCE = 16  # the same where none of them was accepted, in at least 4 steps
SHORT_EVIDENCE = 8  # enough where drafting did not pay for the requests before
PROBE_INTERVAL = 32  # steps from one probe to the next, 31 of them plain


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured seconds: a plain pass, a pass with the whole draft, and making the draft."""

    plain_s: float
    speculative_s: float
    draft_s: float = 0.0

    def break_even_accepted(self) -> float:
        """Accepted tokens a step must bring so that drafting is as fast as not drafting.

        A plain step emits 1 token in `plain_s`; a step with drafts emits 1 + accepted in `speculative_s` + `draft_s`.
        """
        return (self.speculative_s + self.draft_s) / self.plain_s - 1.0 if self.plain_s > 0 else 0.0


@dataclass(slots=True)
class _Guard:
    """Recent acceptance: (drafted, accepted) per step, over the last `WINDOW` drafted tokens."""

    recent: deque[tuple[int, int]]
    drafted: int = 0
    accepted: int = 0
    plain_left: int = 0  # plain steps until the next probe; 0 = drafting
    is_probe: bool = False
    min_evidence: int = MIN_EVIDENCE

    def has_evidence(self) -> bool:
        """Whether enough is known to judge; a probe is judged by itself."""
        is_clear = self.accepted == 0 and self.drafted >= CLEAR_EVIDENCE and len(self.recent) >= 4
        return self.is_probe or is_clear or self.drafted >= self.min_evidence

    def add(self, num_drafted: int, num_accepted: int) -> None:
        self.recent.append((num_drafted, num_accepted))
        self.drafted += num_drafted
        self.accepted += num_accepted
        while self.drafted - self.recent[0][0] >= WINDOW:
            drafted, accepted = self.recent.popleft()
            self.drafted -= drafted
            self.accepted -= accepted


class DraftLengthPolicy:
    """A fixed draft length with a guard: where acceptance is below the break-even point, steps are plain but for a probe now and then.

    Args:
        num_draft_tokens: depth of a draft.
        row_budget: rows of the target pass a tree may cost, root included; None = a chain's.
        costs: measured costs; None switches the guard off.
    """

    def __init__(self, num_draft_tokens: int, *, row_budget: int | None = None, costs: StepCosts | None = None) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.row_budget = row_budget if row_budget is not None else num_draft_tokens + 1
        self.costs = costs
        self._guards: dict[int, _Guard] = {}
        self._lately = _Guard(deque())  # all requests together
        self._draft_times: deque[float] = deque(maxlen=15)

    def budget(self, request: Request) -> DraftBudget | None:
        """What this request may draft now; None = a plain step because drafting does not pay at present."""
        guard = self._guards.get(id(request))
        if guard is None:
            is_doubtful = self._lately.drafted >= MIN_EVIDENCE and not self._pays(self._lately)
            guard = self._guards[id(request)] = _Guard(deque(), min_evidence=SHORT_EVIDENCE if is_doubtful else MIN_EVIDENCE)
        if guard.plain_left > 0:
            guard.plain_left -= 1
            if guard.plain_left > 0:
                return None
            guard.is_probe = True
        return DraftBudget(self.row_budget, self.num_draft_tokens)

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Told after every step with drafts."""
        guard = self._guards.get(id(request))
        if guard is None or self.costs is None:
            return
        guard.add(num_drafted, num_accepted)
        self._lately.add(num_drafted, num_accepted)
        if guard.has_evidence():
            guard.is_probe = False
            guard.min_evidence = MIN_EVIDENCE
            if not self._pays(guard):
                self._guards[id(request)] = _Guard(deque(), plain_left=PROBE_INTERVAL)

    def observe_draft_time(self, seconds: float) -> None:
        """Told how long the last draft took to make. The median counts: a first draft also reads the prompt."""
        if self.costs is not None:
            self._draft_times.append(seconds)
            self.costs = StepCosts(self.costs.plain_s, self.costs.speculative_s, statistics.median(self._draft_times))

    def release(self, request: Request) -> None:
        """Forget a request."""
        self._guards.pop(id(request), None)

    def _pays(self, guard: _Guard) -> bool:
        return self.costs is None or guard.accepted / len(guard.recent) >= self.costs.break_even_accepted()
