"""How much to draft. Decisions are pure functions of counts and costs; they change speed, never tokens."""

import math
import statistics
from collections import deque
from dataclasses import dataclass

from paceline.speculation.draft_history import MIN_EVIDENCE, DraftHistory, expected_accepted
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.pass_times import PassTimes
from paceline.speculation.reading import worthwhile_s
from paceline.speculation.request import FinishReason, Request

SHORT_STEPS = 2  # steps with drafts that are enough to judge a request while drafting does not pay for all together
MIN_LUCK = 8  # drafted tokens of a request before its own success outweighs that drafting does not pay for all together
DOUBTFUL_STEPS = 2  # steps with drafts and nothing accepted, after which a request drafts half as much until something is
PROBE_INTERVAL = 32  # steps from one probe of any request to the next: a probe slows the pass of all
FIRST_ROWS = 16  # drafted tokens of a pass in which all requests draft for the first time, while drafting is not known to pay
LEAST_BREAK_EVEN = 0.05  # accepted tokens a step, however cheap rows seem: times are never measured without noise
UNKNOWN_ACCEPTANCE = 0.5  # of a drafted token, before any was measured
HOPED_ACCEPTANCE = 0.8  # the same, to decide whether a drafter reads a request's text at all
HOPED_STEPS = 2  # weight of that hope, in measured steps
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


class DraftLengthPolicy:
    """A fixed draft length with a guard: where acceptance is below the break-even point, steps are plain but for a probe now and then.

    The point depends on the other rows of the pass: five rows cost hardly more than one, but eighty cost more than sixteen. So it is
    computed before every step, from the times of earlier passes. What is known of a request's drafts is its `draft_history`.

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
        self._num_requests = 0  # with a history, not released
        self._lately = DraftHistory()  # all requests together
        self._draft_times: deque[float] = deque(maxlen=15)
        self._unread_s = 0.0  # time of passes since a drafter read a text
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
        history = request.draft_history
        if history is None:
            history = request.draft_history = DraftHistory()
            self._num_requests += 1
        if self._has_failed(history):
            history.min_evidence = 1  # it is judged by what is known until the probe
            history.num_plain += 1
            if history.num_plain < PROBE_INTERVAL * self._num_requests:
                return None
            history = request.draft_history = DraftHistory(min_evidence=1, was_probed=True)
        history.num_plain = 0
        is_new = len(history.steps) < SHORT_STEPS or (history.drafted < MIN_LUCK and self._fails_lately)
        if is_new and not history.was_probed:
            return self._first_budget()
        is_doubtful = self.costs is not None and history.accepted == 0 and len(history.steps) >= DOUBTFUL_STEPS
        return self._chain_budget(max(1, self.num_draft_tokens // 2)) if is_doubtful else self.full_budget

    def acceptance(self, request: Request) -> float:
        """Share of the request's drafted tokens that were kept lately; an even chance before any is known."""
        history = request.draft_history
        return history.accepted / history.drafted if history is not None and history.drafted else UNKNOWN_ACCEPTANCE

    def max_reading_s(self, request: Request) -> float:
        """Seconds that a drafter may take to read what it has not seen of a request: as many as drafting is expected to pay back.

        Where it is not, a small share of all time, so that it is noticed when drafting begins to pay.
        """
        if self.costs is None or self._times is None:
            return math.inf
        known = request.draft_history
        if known is None or not known.steps:
            known = self._lately
        num_steps, hoped = len(known.steps), HOPED_STEPS * expected_accepted(HOPED_ACCEPTANCE, self.num_draft_tokens)
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
        history = request.draft_history
        if history is None or self.costs is None:
            return
        history.add(num_drafted, num_accepted)
        self._lately.add(num_drafted, num_accepted)
        if self._pays(history):
            history.min_evidence = MIN_EVIDENCE

    def observe_pass(self, num_rows: int, seconds: float) -> None:
        """Told how long a target pass took."""
        if self._times is not None:
            self._times.observe(num_rows, seconds)
            self._unread_s += seconds

    def observe_draft_time(self, seconds: float) -> None:
        """Told how long the last draft took to make, without reading. The median counts."""
        if self.costs is not None:
            self._draft_times.append(seconds)
            self.costs = StepCosts(self.costs.plain_s, self.costs.speculative_s, statistics.median(self._draft_times))
            self._break_even = self._find_break_even()

    def release(self, request: Request) -> None:
        """Forget a request."""
        if request.draft_history is not None:
            request.draft_history = None
            self._num_requests -= 1
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            length = float(request.num_output_tokens)
            self._mean_output = 0.75 * self._mean_output + 0.25 * length if self._mean_output else length

    def _first_budget(self) -> DraftBudget:
        """What a request without a history may draft: little in a large batch, where all try at once and would pay at once."""
        if self.costs is None or (self._lately.has_evidence and self._pays(self._lately)):
            return self.full_budget
        return self._chain_budget(min(self.num_draft_tokens, max(1, FIRST_ROWS // max(1, self._num_drafting))))

    def _chain_budget(self, depth: int) -> DraftBudget:
        return self.full_budget if depth == self.num_draft_tokens else DraftBudget(depth + 1, depth)

    def _has_failed(self, history: DraftHistory) -> bool:
        """Whether drafting for this request is known not to pay."""
        if history.drafted == 0 or self._pays(history):
            return False
        if history.has_evidence:
            return True
        # Where it does not pay for all together either, few steps are enough, and one where nothing at all was accepted.
        if history.was_probed or not self._fails_lately:
            return False
        return len(history.steps) >= SHORT_STEPS or self._lately.accepted == 0

    @property
    def _fails_lately(self) -> bool:
        """Whether drafting is known not to pay for all requests together."""
        return self._lately.has_evidence and not self._pays(self._lately)

    def _pays(self, history: DraftHistory) -> bool:
        return history.accepted_per_step(self.num_draft_tokens) >= self._break_even

    def _find_break_even(self) -> float:
        """Accepted tokens a step that pay for their rows in the step to come, if all requests draft that may."""
        if self.costs is None or self._times is None:
            return 0.0
        rows = self._known_rows
        with_drafts_s = self._times.at(rows + (self.row_budget - 1) * self._num_drafting)
        return max(LEAST_BREAK_EVEN, StepCosts(self._times.at(rows), with_drafts_s, self.costs.draft_s).break_even_accepted())
