"""Asking the drafter, and making sure that nothing it says or fails to say can do harm."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import is_interrupt
from paceline.kv_cache.row_plan import TreeLayout
from paceline.runtimes.base import FloatArray
from paceline.speculation.backoff import Backoff
from paceline.speculation.constrained import SOURCE as FORCED
from paceline.speculation.constrained import constrain, forced_run
from paceline.speculation.draft_length import DraftLengthPolicy, share_rows
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter
from paceline.speculation.rejection import Acceptance, verify_rejection
from paceline.speculation.request import Request
from paceline.speculation.stats import PlainReason
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import VerifyResult, verify
from paceline.speculation.work import Work

log = logging.getLogger(__name__)

Asked = list[tuple[Work, DraftBudget]]
MAX_FORCED = 16
"""Tokens that a grammar leaves no choice about and that are guessed at once, however few a drafter may."""


class Speculator:
    """A drafter, how much it may draft, by which rule its guesses are kept, and the fallback to plain steps.

    Args:
        drafter: None for plain decoding.
        vocab_size: ids the tokenizer knows; rows of the model beyond them are padding, never emitted, and guesses of them are cut.
        layout: how trees are laid out, which decides what they cost.
        acceptance: which guesses are kept.

    Attributes:
        num_failures: how often the drafter raised or answered nonsense.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        policy: DraftLengthPolicy,
        *,
        vocab_size: int,
        layout: TreeLayout,
        acceptance: Acceptance = Acceptance.MATCH,
    ) -> None:
        self.drafter, self.policy, self.acceptance = drafter, policy, acceptance
        self.vocab_size, self._layout = vocab_size, layout
        self.num_failures = 0
        self._backoffs: dict[str, Backoff] = {}
        self._has_warned = False

    @property
    def drafters(self) -> dict[str, Drafter]:
        """The drafter and those it is made of, by name: what one request may ask for."""
        if self.drafter is None:
            return {}
        members = getattr(self.drafter, "members", ())
        return {one.name: one for one in (*reversed(members), self.drafter)}

    def propose(self, works: Sequence[Work], max_rows: int | None = None) -> None:
        """Hang a tree under the root of every work that may draft; the others get the reason why not.

        Args:
            max_rows: of the pass, known tokens included; None = no limit.
        """
        asked: Asked = []
        num_known = sum(work.num_given for work in works)
        if self.drafter is not None:
            self.policy.begin_step(num_known, sum(work.tree is not None and work.num_given == 1 for work in works))
        is_constrained = any(work.request.processor.constraint is not None for work in works)
        for work in works:
            budget = self._budget(work)
            if isinstance(budget, PlainReason):
                work.plain = budget
                budget = self._forced_budget(work.request) if budget is PlainReason.GUARD else None
            elif budget is not None and is_constrained:
                budget = self._with_forced(budget, work.request)
            if budget is not None:
                asked.append((work, budget))
        if max_rows is not None and asked:
            asked = self._share(asked, max_rows - num_known)
        open_ones = self._without_forced(asked) if is_constrained else asked
        if self.drafter is not None and open_ones:
            for drafter, own in self._by_drafter(self.drafter, open_ones):
                self._ask(drafter, own)
        if is_constrained:
            self._constrain(works, asked)

    def verify(self, tree: DraftTree, logits: FloatArray, request: Request) -> VerifyResult:
        """Walk a tree by the rule in use."""
        return verify(tree, logits, request) if self.acceptance is Acceptance.MATCH else verify_rejection(tree, logits, request)

    def learn(self, request: Request, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        """Tell the policy what became of a tree; what a grammar forces says nothing about the drafter."""
        num_drafted, num_accepted = tree.num_draft_tokens, len(accepted_nodes)
        if request.processor.constraint is not None:
            num_drafted -= sum(source == FORCED for source in tree.sources)
            num_accepted -= sum(tree.sources[node] == FORCED for node in accepted_nodes)
        if num_drafted > 0:
            self.policy.observe(request, num_drafted, num_accepted)

    def observe_pass(self, num_rows: int, seconds: float) -> None:
        """Told how long the target's pass took."""
        if self.drafter is not None:
            self.policy.observe_pass(num_rows, seconds)

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        """Pass on what a target pass made permanent; of requests without speculation nobody needs to know."""
        if self.drafter is None:
            return
        try:
            self.drafter.observe([one for one in rows if not one.request.speculation.is_off])
        except BaseException as error:  # a drafter may fail in any way; the target goes on without it
            self._warn(error)

    def preempt(self, request: Request) -> None:
        """Tell the drafter that a request's rows were dropped and will run again; what was learned of its acceptance stays."""
        if self.drafter is None or request.speculation.is_off:
            return
        try:
            self.drafter.preempt(request)
        except BaseException as error:  # as in `observe`
            self._warn(error)

    def release(self, request: Request) -> None:
        """Forget a request that ended."""
        self.policy.release(request)
        if self.drafter is None or request.speculation.is_off:
            return
        try:
            self.drafter.release(request)
        except BaseException as error:  # as in `observe`
            self._warn(error)

    def _budget(self, work: Work) -> DraftBudget | PlainReason | None:
        request = work.request
        if work.tree is None:
            return None
        if work.num_given > 1 or request.num_output_tokens == 0:
            return PlainReason.RESUMED if request.num_preemptions and request.num_output_tokens else PlainReason.PROMPT
        if self.drafter is None or request.speculation.is_off:
            return PlainReason.OFF
        if request.num_remaining_tokens < 2:  # the bonus token takes one
            return PlainReason.NO_ROOM
        budget = self.policy.budget(request)
        return PlainReason.GUARD if budget is None else self._fitting(budget, request)

    def _fitting(self, budget: DraftBudget, request: Request) -> DraftBudget:
        """The part of a budget that is of use to a request."""
        row_budget, max_depth = budget.row_budget, min(budget.max_depth, request.num_remaining_tokens - 1)
        limit = request.speculation.max_draft_tokens
        if limit is not None:
            row_budget, max_depth = min(row_budget, limit + 1), min(max_depth, limit)
        return DraftBudget(row_budget, max_depth, self._layout, self._wants_draws(request), self._max_reading_s(request))

    def _max_reading_s(self, request: Request) -> float:
        """Seconds that a drafter may read of a request; no limit where it has read everything."""
        try:
            return self.policy.max_reading_s(request) if self.drafter is not None and self.drafter.reading_s(request) > 0.0 else math.inf
        except BaseException as error:  # as in `observe`
            self._warn(error)
            return math.inf

    def _wants_draws(self, request: Request) -> bool:
        return self.acceptance is Acceptance.REJECTION and not request.params.is_greedy

    def _share(self, asked: Asked, available: int) -> Asked:
        """Budgets that together fit what is left of the pass."""
        wanted = [budget.row_budget - 1 for _, budget in asked]
        if sum(wanted) <= available:
            return asked
        shares = share_rows(wanted, [self.policy.acceptance(work.request) for work, _ in asked], available)
        kept: Asked = []
        for (work, budget), share in zip(asked, shares, strict=True):
            if share > 0:
                kept.append((work, replace(budget, row_budget=share + 1)))
            else:
                work.plain = PlainReason.FULL_PASS
        return kept

    def _by_drafter(self, drafter: Drafter, asked: Asked) -> list[tuple[Drafter, Asked]]:
        """Who is asked for whom: the drafter, or the one of several that a request names."""
        if all(work.request.speculation.drafter is None for work, _ in asked):
            return [(drafter, asked)]
        named, groups = self.drafters, dict[int, tuple[Drafter, Asked]]()
        for work, budget in asked:
            wanted = named.get(work.request.speculation.drafter or "", drafter)
            groups.setdefault(id(wanted), (wanted, []))[1].append((work, budget))
        return list(groups.values())

    def _ask(self, drafter: Drafter, asked: Asked) -> None:
        backoff = self._backoffs.setdefault(drafter.name, Backoff())
        if not backoff.is_due():
            for work, _ in asked:
                work.make_plain(PlainReason.DRAFTER_FAILED)
            return
        try:
            self._propose(drafter, asked)
            backoff.note(failed=False)
        except BaseException as error:  # as in `observe`
            self._warn(error)
            backoff.note(failed=True)
            for work, _ in asked:
                work.make_plain(PlainReason.DRAFTER_FAILED)

    def _propose(self, drafter: Drafter, asked: Asked) -> None:
        """Hang the drafter's trees, for those whose text it has read or may read."""
        affordable: Asked = []
        for work, budget in asked:
            if drafter.may_guess(work.request, budget.max_reading_s):
                affordable.append((work, budget))
            else:
                work.plain = PlainReason.GUARD
        if not affordable:
            return
        unread = [work.request for work, budget in affordable if budget.max_reading_s < math.inf]
        unread_s = sum(map(drafter.reading_s, unread))
        start = time.perf_counter()
        trees = drafter.propose([work.request for work, _ in affordable], [budget for _, budget in affordable])
        for (work, budget), tree in zip(affordable, trees, strict=True):
            self._take(work, tree, budget)
        seconds = time.perf_counter() - start
        read_s = unread_s - sum(map(drafter.reading_s, unread))
        if read_s > 0.0:
            self.policy.observe_reading()
        if any(work.plain is None for work, _ in affordable):
            self.policy.observe_draft_time(max(0.0, seconds - read_s))

    def _take(self, work: Work, tree: DraftTree | None, budget: DraftBudget) -> None:
        if tree is None or tree.num_draft_tokens == 0:
            work.make_plain(PlainReason.NO_GUESS)
            return
        tree.check()
        trimmed = tree.trim(vocab_size=self.vocab_size, max_depth=budget.max_depth, row_budget=budget.row_budget, layout=self._layout)
        work.request.stats.cut += tree.num_draft_tokens - trimmed.num_draft_tokens
        if trimmed.num_draft_tokens == 0:
            work.make_plain(PlainReason.CUT)
        else:
            work.tree = trimmed

    def _forced_budget(self, request: Request) -> DraftBudget | None:
        """Room for what the request's grammar forces, which is as good as known; None where it forces nothing."""
        most = min(MAX_FORCED, request.num_remaining_tokens - 1)
        limit = request.speculation.max_draft_tokens
        tree = forced_run(request, most if limit is None else min(most, limit))
        if tree is None:
            return None
        return DraftBudget(tree.num_draft_tokens + 1, tree.num_draft_tokens, self._layout, self._wants_draws(request))

    def _with_forced(self, budget: DraftBudget, request: Request) -> DraftBudget:
        """A budget for all that the request's grammar forces, if that is more than may be guessed."""
        forced = self._forced_budget(request)
        if forced is None or forced.max_depth <= budget.max_depth:
            return budget
        return replace(budget, row_budget=max(budget.row_budget, forced.row_budget), max_depth=forced.max_depth)

    def _without_forced(self, asked: Asked) -> Asked:
        """Those for whom the drafter can say something: where a grammar forces all that may be guessed, that is the tree."""
        rest: Asked = []
        for work, budget in asked:
            depth = min(budget.max_depth, budget.row_budget - 1)
            tree = forced_run(work.request, depth)
            if tree is not None and tree.num_draft_tokens == depth:
                work.tree = tree
            else:
                rest.append((work, budget))
        return rest

    def _constrain(self, works: Sequence[Work], asked: Asked) -> None:
        """Cut guesses that a request's grammar forbids, and guess what it leaves no choice about."""
        budgets = {id(work): budget for work, budget in asked}
        for work in works:
            request, budget = work.request, budgets.get(id(work))
            if request.processor.constraint is None or budget is None or work.tree is None:
                continue
            try:
                self._constrain_one(work, budget)
            except BaseException as error:  # the walk obeys the grammar in any case; if that cannot go on it will say so
                self._warn(error)

    def _constrain_one(self, work: Work, budget: DraftBudget) -> None:
        before = work.tree if work.tree is not None and work.tree.num_draft_tokens > 0 else None
        after = constrain(before, work.request, budget.max_depth, budget.row_budget, layout=self._layout)
        num_before = before.num_draft_tokens if before is not None else 0
        num_after = after.num_draft_tokens if after is not None else 0
        work.request.stats.cut += max(0, num_before - num_after)
        if after is not None and num_after > 0:
            work.tree, work.plain = after, None
        elif before is not None:
            work.make_plain(PlainReason.CUT)

    def _warn(self, error: BaseException) -> None:
        """Note a failure; an interrupt is none of the drafter's, and goes on."""
        if is_interrupt(error):
            raise error
        self.num_failures += 1
        if not self._has_warned:
            log.warning("the drafter failed (%s: %s); steps without its guesses are plain", type(error).__name__, error)
            self._has_warned = True
