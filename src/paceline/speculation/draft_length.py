"""How much to draft. Decisions are pure functions of counts and costs; they change speed, never tokens."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

from paceline.speculation.drafter import DraftBudget
from paceline.speculation.pass_times import PassTimes
from paceline.speculation.reading import worthwhile_s
from paceline.speculation.request import FinishReason, Request

WINDOW = 64  # drafted tokens the guard looks back on
MIN_EVIDENCE = 24  # drafted tokens before it may act
CLEAR_STEPS = 4  # steps with drafts that are enough where nothing was accepted
SHORT_STEPS = 2  # enough where drafting did not pay for the requests before
MIN_LUCK = 8  # drafted tokens of a request before its success counts against everybody else's failure
DOUBTFUL_STEPS = 2  # steps without success behind which a request drafts half as much until something is accepted
PROBE_INTERVAL = 32  # steps from one probe to the next, 31 of them plain; of all requests together, for one slows the pass of all
FIRST_ROWS = 16  # drafted tokens of a pass in which all requests draft for the first time, while drafting is not known to pay
LEAST_BREAK_EVEN = 0.05  # accepted tokens a step, however cheap rows seem: times are never measured without noise
UNKNOWN_ACCEPTANCE = 0.5  # of a drafted token, before any was measured
HOPED_ACCEPTANCE = 0.8  # the same where it is to be decided whether a drafter gets to know a request at all
HOPED_STEPS = 2  # measured steps that hope counts for
READING_SHARE = 1 / 64  # of the time of all passes: what reading may cost where it is not expected to pay


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


def share_rows(wanted: Sequence[int], acceptance: Sequence[float], available: int) -> list[int]:
    """Divide the draft rows of a pass among its requests so that most tokens are to be expected.

    The i-th draft row of a request brings a token with probability acceptance^i, if its drafts are a chain. So the rows go, one by one, to
    whoever gains most by the next one; where all gain alike, to who has the fewest.

    Args:
        wanted: draft rows each request could use, the root not counted.
        acceptance: probability that one of its guesses is kept, given those before it were.
        available: rows to divide.

    Returns:
        rows for each, in order.
    """
    if sum(wanted) <= available:
        return list(wanted)
    shares = [0] * len(wanted)
    queue = [(-rate, 0, index) for index, (rate, rows) in enumerate(zip(acceptance, wanted, strict=True)) if rows > 0]
    heapify(queue)
    for _ in range(max(0, available)):
        gain, share, index = queue[0]
        shares[index] = share + 1
        is_full = shares[index] == wanted[index]
        heapreplace(queue, (1.0 if is_full else gain * acceptance[index], shares[index], index))
    return shares


@dataclass(slots=True)
class _Guard:
    """Recent acceptance: (drafted, accepted) per step, over the last `WINDOW` drafted tokens.

    Attributes:
        num_plain: plain steps since drafting did not pay any more.
        min_evidence: drafted tokens before it may act; one is enough for a probe, which is judged by itself.
        was_probed: whether it ever acted.
    """

    recent: deque[tuple[int, int]] = field(default_factory=deque)
    drafted: int = 0
    accepted: int = 0
    num_plain: int = 0
    min_evidence: int = MIN_EVIDENCE
    was_probed: bool = False

    def accepted_per_step(self, depth: int) -> float:
        """Accepted tokens a step of drafts of `depth` tokens; of shorter ones what they promise, if every token has the same chance."""
        drafted, accepted = self.drafted / len(self.recent), self.accepted / len(self.recent)
        if drafted >= depth or accepted == 0:
            return accepted
        low, high = 0.0, 1.0
        for _ in range(10):
            chance = (low + high) / 2
            low, high = (chance, high) if _chain_sum(chance, drafted) < accepted else (low, chance)
        return _chain_sum(high, depth)

    @property
    def has_evidence(self) -> bool:
        """Whether enough is known to judge."""
        return (self.accepted == 0 and len(self.recent) >= CLEAR_STEPS) or self.drafted >= self.min_evidence

    def add(self, num_drafted: int, num_accepted: int) -> None:
        self.recent.append((num_drafted, num_accepted))
        self.drafted += num_drafted
        self.accepted += num_accepted
        while self.drafted - self.recent[0][0] >= WINDOW:
            drafted, accepted = self.recent.popleft()
            self.drafted -= drafted
            self.accepted -= accepted


def _chain_sum(chance: float, depth: float) -> float:
    """Tokens that a chain of `depth` is expected to bring, each accepted with this chance if those before it were."""
    return depth if chance == 1.0 else chance * (1.0 - chance**depth) / (1.0 - chance)


class DraftLengthPolicy:
    """A fixed draft length with a guard: where acceptance is below the break-even point, steps are plain but for a probe now and then.

    The point depends on who else is in the pass: while one row costs nearly as much as five, drafts are nearly free, but eighty cost more
    than sixteen. So it is asked before every step, from the times of the passes that ran.

    Args:
        num_draft_tokens: depth of a draft.
        row_budget: rows of the target pass a tree may cost, root included; None = a chain's.
        costs: measured costs; None switches the guard off.
    """

    def __init__(self, num_draft_tokens: int, *, row_budget: int | None = None, costs: StepCosts | None = None) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.row_budget = row_budget if row_budget is not None else num_draft_tokens + 1
        self.costs = costs
        self._times = PassTimes({1: costs.plain_s, self.row_budget: costs.speculative_s}) if costs is not None else None
        self._known_rows = self._num_drafting = 1  # of the step to come
        self._guards: dict[int, _Guard] = {}
        self._lately = _Guard()  # all requests together
        self._draft_times: deque[float] = deque(maxlen=15)
        self._unread_s = 0.0  # time of passes since somebody's text was read
        self._mean_output = 0.0  # tokens of the last outputs, 0 = none yet
        self._break_even = self._find_break_even()

    @property
    def full_budget(self) -> DraftBudget:
        """What a request may draft where drafting pays."""
        return DraftBudget(self.row_budget, self.num_draft_tokens)

    def begin_step(self, num_known_rows: int, num_drafting: int) -> None:
        """Told before a step how many rows its pass has without guesses, and for how many requests some may be made."""
        self._known_rows, self._num_drafting = num_known_rows, num_drafting
        self._break_even = self._find_break_even()

    def budget(self, request: Request) -> DraftBudget | None:
        """What this request may draft now; None = a plain step because drafting does not pay at present."""
        guard = self._guards.get(id(request))
        if guard is None:
            guard = self._guards[id(request)] = _Guard()
        if self._has_failed(guard):
            guard.min_evidence = 1  # it is judged by what is known until the probe
            guard.num_plain += 1
            if guard.num_plain < PROBE_INTERVAL * len(self._guards):
                return None
            guard = self._guards[id(request)] = _Guard(min_evidence=1, was_probed=True)
        guard.num_plain = 0
        is_new = len(guard.recent) < SHORT_STEPS or (guard.drafted < MIN_LUCK and self._fails_lately)
        if is_new and not guard.was_probed:
            return self._first_budget()
        is_doubtful = self.costs is not None and guard.accepted == 0 and len(guard.recent) >= DOUBTFUL_STEPS
        return self._chain_budget(max(1, self.num_draft_tokens // 2)) if is_doubtful else self.full_budget

    def acceptance(self, request: Request) -> float:
        """Share of the request's drafted tokens that were kept lately; an even chance before any is known."""
        guard = self._guards.get(id(request))
        return guard.accepted / guard.drafted if guard is not None and guard.drafted else UNKNOWN_ACCEPTANCE

    def max_reading_s(self, request: Request) -> float:
        """Seconds that a drafter may take to read what it has not seen of a request: as many as drafting is expected to pay back.

        Where it is not, a small share of all time, so that it is noticed when drafting begins to pay.
        """
        if self.costs is None or self._times is None:
            return math.inf
        guard = self._guards.get(id(request))
        known = guard if guard is not None and guard.recent else self._lately
        num_steps, hoped = len(known.recent), HOPED_STEPS * _chain_sum(HOPED_ACCEPTANCE, self.num_draft_tokens)
        measured = num_steps * known.accepted_per_step(self.num_draft_tokens) if num_steps else 0.0
        worthwhile = worthwhile_s(
            plain_s=self._times.at(self._known_rows),
            step_s=self._times.at(self._known_rows + (self.row_budget - 1) * self._num_drafting) + self.costs.draft_s,
            accepted=(measured + hoped) / (num_steps + HOPED_STEPS),
            num_tokens=self._num_expected(request),
        )
        return max(worthwhile / max(1, self._num_drafting), READING_SHARE * self._unread_s)

    def _num_expected(self, request: Request) -> int:
        """Tokens that are still to come: as many as outputs have lately, or again as many as there are, but no more than may be."""
        num_done = request.num_output_tokens
        expected = max(self._mean_output - num_done, num_done) if self._mean_output else request.num_remaining_tokens
        return min(request.num_remaining_tokens, max(1, int(expected)))

    def observe_reading(self) -> None:
        """Told that a drafter read what it had not seen."""
        self._unread_s = 0.0

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Told after every step with drafts."""
        guard = self._guards.get(id(request))
        if guard is None or self.costs is None:
            return
        guard.add(num_drafted, num_accepted)
        self._lately.add(num_drafted, num_accepted)
        if self._pays(guard):
            guard.min_evidence = MIN_EVIDENCE

    def observe_pass(self, num_rows: int, seconds: float) -> None:
        """Told how long a target pass took."""
        if self._times is not None:
            self._times.observe(num_rows, seconds)
            self._unread_s += seconds

    def observe_draft_time(self, seconds: float) -> None:
        """Told how long the last draft took to make, reading what had not been seen left aside. The median counts."""
        if self.costs is not None:
            self._draft_times.append(seconds)
            self.costs = StepCosts(self.costs.plain_s, self.costs.speculative_s, statistics.median(self._draft_times))
            self._break_even = self._find_break_even()

    def release(self, request: Request) -> None:
        """Forget a request."""
        self._guards.pop(id(request), None)
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            length = float(request.num_output_tokens)
            self._mean_output = 0.75 * self._mean_output + 0.25 * length if self._mean_output else length

    def _first_budget(self) -> DraftBudget:
        """What a request may draft of whom nothing is known: little in a large batch, for many who learn at once pay for it at once."""
        if self.costs is None or (self._lately.has_evidence and self._pays(self._lately)):
            return self.full_budget
        return self._chain_budget(min(self.num_draft_tokens, max(1, FIRST_ROWS // max(1, self._num_drafting))))

    def _chain_budget(self, depth: int) -> DraftBudget:
        return self.full_budget if depth == self.num_draft_tokens else DraftBudget(depth + 1, depth)

    def _has_failed(self, guard: _Guard) -> bool:
        """Whether it is known that drafting for this request does not pay."""
        if guard.drafted == 0 or self._pays(guard):
            return False
        if guard.has_evidence:
            return True
        # Where it does not pay for all together either, little is enough; next to nothing where nobody's drafts were accepted.
        if guard.was_probed or not self._fails_lately:
            return False
        return len(guard.recent) >= SHORT_STEPS or self._lately.accepted == 0

    @property
    def _fails_lately(self) -> bool:
        """Whether drafting is known not to pay for all requests together."""
        return self._lately.has_evidence and not self._pays(self._lately)

    def _pays(self, guard: _Guard) -> bool:
        return guard.accepted_per_step(self.num_draft_tokens) >= self._break_even

    def _find_break_even(self) -> float:
        """Accepted tokens a step that are worth their rows in the step to come, if all draft for whom it may be done."""
        if self.costs is None or self._times is None:
            return 0.0
        rows = self._known_rows
        with_drafts_s = self._times.at(rows + (self.row_budget - 1) * self._num_drafting)
        return max(LEAST_BREAK_EVEN, StepCosts(self._times.at(rows), with_drafts_s, self.costs.draft_s).break_even_accepted())
