"""Proposing: the drafts of one step, within the limits of requests, pass and cache, whatever a drafter does.

Lookup drafters are called first because they take next to no time. A later drafter is called where the policy expects more of it than of
the draft that a request has, and the better draft is kept.
"""

import logging
from collections.abc import Sequence
from time import perf_counter
from types import TracebackType

from paceline.errors import CapacityError, is_interrupt
from paceline.kv_cache.cache import KVCache
from paceline.kv_cache.row_plan import RowPlan, TreeLayout
from paceline.speculation.constrained import constrain_draft, forced_draft, with_forced
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import SkipReason

MAX_FAILURE_BACKOFF = 64  # steps that a drafter is left out after it failed several times in a row

log = logging.getLogger(__name__)


class ErrorGuard:
    """Context manager that counts and swallows exceptions, and logs the first one; interrupts pass. May be nested."""

    def __init__(self) -> None:
        self.num_failures = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        return error is not None and self.handle(error)

    def handle(self, error: BaseException) -> bool:
        """Count an exception; return False for an interrupt, which must be raised."""
        if is_interrupt(error):
            return False
        if self.num_failures == 0:
            log.warning("a drafter failed (%s: %s); steps without its drafts are plain", type(error).__name__, error)
        self.num_failures += 1
        return True


class Proposer:
    """Calls the drafters.

    Args:
        drafters: lookup drafters are called first, the others in this order.
        guard: handles what drafters raise.
        vocab_size: drafted ids from here on are removed.
        layout: how trees are laid out in the cache, which decides the rows they take.
    """

    def __init__(self, drafters: Sequence[Drafter], guard: ErrorGuard, *, vocab_size: int, layout: TreeLayout) -> None:
        # names are read once: a property of a drafter may raise later
        self._drafters = [(drafter.name, drafter) for drafter in sorted(drafters, key=lambda drafter: not drafter.traits.is_lookup)]
        self.draft_s = self.plan_s = 0.0  # of the step: drafting, and all other work of this class
        self._guard, self._vocab_size, self._layout = guard, vocab_size, layout
        self._failures: dict[str, tuple[int, int]] = {}  # by drafter: failures in a row, calls to leave out

    def propose(self, batch: Sequence[RequestRows], policy: FixedDraftLength, max_rows: int | None, *, samples_drafts: bool) -> None:
        """Attach a draft to every request that is to draft; the others get the reason why not.

        Args:
            batch: all rows of the pass.
            policy: how much to draft.
            max_rows: of the pass, tokens that are no drafts included; None = no limit.
            samples_drafts: whether requests at temperatures above 0 need drafts with their distributions.
        """
        start_s, self.draft_s = perf_counter(), 0.0
        reason: SkipReason | None = SkipReason.DRAFTER_FAILED
        with self._guard:
            reason = policy.begin_step(batch)
        for rows in batch:
            rows.skip_reason, rows.limit = self._limit(rows, policy, samples_drafts=samples_drafts)
            if rows.limit is not None and rows.request.processor.constraint is not None:
                with self._guard:
                    rows.tree = forced_draft(rows.request, rows.limit) or rows.tree
        if reason is None:
            for name, drafter in self._drafters:
                self._draft_with(name, drafter, batch, policy, max_rows)
        for rows in batch:
            if rows.limit is not None and rows.skip_reason is None and rows.num_draft_tokens == 0:
                rows.skip_reason = reason or SkipReason.NO_MATCH
            if rows.limit is not None and rows.request.processor.constraint is not None:
                with self._guard:  # verification obeys the grammar in any case, and reports where it cannot go on
                    constrain_draft(rows, with_forced(rows.limit, rows.request))
        if any(rows.num_draft_tokens for rows in batch):
            with self._guard:
                policy.select(batch, max_rows)
            if max_rows is not None:
                fit_rows(batch, max_rows - sum(rows.num_known for rows in batch))
        self.plan_s = perf_counter() - start_s - self.draft_s

    def _limit(self, rows: RequestRows, policy: FixedDraftLength, *, samples_drafts: bool) -> tuple[SkipReason | None, DraftBudget | None]:
        """The most that may be drafted for a request, or the reason why nothing may."""
        request = rows.request
        if rows.tree is None:
            return None, None
        num_tokens = len(request.token_ids)
        if rows.num_known != 1 or num_tokens == request.num_prompt_tokens:
            return (SkipReason.RESUMED if request.num_preemptions and request.num_output_tokens else SkipReason.PROMPT), None
        if request.speculation.is_off or not self._drafters:
            return SkipReason.OFF, None
        if request.max_len - num_tokens < 2:  # the bonus token takes one
            return SkipReason.NO_ROOM, None
        row_budget, depth = request.limit_draft(policy.row_budget, policy.num_draft_tokens)
        return None, DraftBudget(row_budget, depth, self._layout, samples_drafts and not request.params.is_greedy)

    def _draft_with(
        self, name: str, drafter: Drafter, batch: Sequence[RequestRows], policy: FixedDraftLength, max_rows: int | None
    ) -> None:
        """Let one drafter draft for all requests for which that is expected to pay."""
        failures, num_left_out = self._failures.get(name, (0, 0))
        if num_left_out > 0:
            self._failures[name] = failures, num_left_out - 1
            self._skip_all(batch, name)
            return
        try:
            if self._try_drafting(name, drafter, batch, policy, max_rows):
                self._failures.pop(name, None)
        except BaseException as error:
            if not self._guard.handle(error):
                raise
            self._failures[name] = failures + 1, min(MAX_FAILURE_BACKOFF, 2 ** min(failures, 10) - 1)
            self._skip_all(batch, name)
        for rows in batch:
            rows.budget = None

    def _try_drafting(
        self, name: str, drafter: Drafter, batch: Sequence[RequestRows], policy: FixedDraftLength, max_rows: int | None
    ) -> bool:
        """Plan and propose; return whether the drafter was called."""
        is_any = False
        for rows in batch:
            rows.budget = None
            if not _is_open(rows, name):
                continue
            reason = policy.skip_reason(rows.request, drafter)
            if reason is None and not drafter.has_candidates(rows.request):
                reason = SkipReason.NO_MATCH
            if reason is not None:
                rows.skip(reason)
            else:
                rows.budget = rows.limit
                is_any = True
        if not is_any:
            return False
        policy.plan(batch, drafter, max_rows)
        asked = [(rows, rows.budget) for rows in batch if rows.budget is not None]
        if not asked:
            return False
        is_new = any(drafter.prefill_s(rows.request) > 0.0 for rows, _ in asked)
        start_s = perf_counter()
        trees = drafter.propose([rows.request for rows, _ in asked], [budget for _, budget in asked])
        depth = 0
        for (rows, budget), tree in zip(asked, trees, strict=True):
            if tree is None or tree.num_draft_tokens == 0:
                rows.skip(SkipReason.NO_MATCH)
                continue
            tree.check()
            depth = max(depth, tree.tree_depth)
            usable = tree.trim(vocab_size=self._vocab_size, max_depth=budget.max_depth, row_budget=budget.row_budget, layout=budget.layout)
            if policy.prefers(rows, usable) if usable.num_draft_tokens else rows.num_draft_tokens == 0:
                rows.set_draft(usable, tree.num_draft_tokens, SkipReason.UNUSABLE)
        seconds = perf_counter() - start_s
        self.draft_s += seconds
        if not is_new:
            policy.observe_draft(drafter, len(asked), depth, seconds)
        return True

    def _skip_all(self, batch: Sequence[RequestRows], name: str) -> None:
        for rows in batch:
            if _is_open(rows, name):
                rows.skip(SkipReason.DRAFTER_FAILED)


def _is_open(rows: RequestRows, name: str) -> bool:
    """Whether a drafter may draft for a request, which may name one of several.

    A drawn draft is final: to replace it because of what was drawn would change the distribution that rejection keeps.
    """
    is_drawn = rows.tree is not None and bool(rows.tree.draft_probs)
    return rows.limit is not None and rows.request.speculation.drafter in (None, name) and not is_drawn


def fit_rows(batch: Sequence[RequestRows], available: int) -> None:
    """Prune drafts to the rows that a pass has left for them, shared as evenly as their sizes allow."""
    wanted = [rows.num_draft_tokens for rows in batch]
    if sum(wanted) <= available:
        return
    shares, left = [0] * len(wanted), max(0, available)
    while left > 0 and (unfilled := [index for index, most in enumerate(wanted) if shares[index] < most]):
        for index in unfilled[:left]:
            shares[index] += 1
        left -= len(unfilled[:left])
    for rows, count, share in zip(batch, wanted, shares, strict=True):
        if share < count and rows.tree is not None:
            kept = rows.tree.prune(lambda parents, share=share: len(parents) <= share + 1)  # type: ignore[misc]
            rows.set_draft(kept, count, SkipReason.PASS_FULL)


def reserve(batch: Sequence[RequestRows], cache: KVCache) -> list[RowPlan]:
    """Reserve cache slots for all rows of a pass. Drafts shrink where blocks are short; tokens that are no drafts come first.

    Raises:
        CapacityError: the tokens that are no drafts do not fit; nothing was changed.
    """
    try:
        for rows in batch:
            try:
                rows.plan = cache.reserve(rows.request.sequence, rows.parents, rows.num_known)
            except CapacityError:  # drafts of the requests before may hold the blocks
                _free_blocks(batch, cache, cache.num_blocks_needed(rows.request.sequence, range(-1, rows.num_known - 1)))
                _shrink(rows, cache, cache.pool.num_free)
                rows.plan = cache.reserve(rows.request.sequence, rows.parents, rows.num_known)
    except BaseException:
        for rows in batch:
            cache.cancel(rows.request.sequence)
        raise
    return [rows.plan for rows in batch if rows.plan is not None]  # every one has a plan now


def _free_blocks(batch: Sequence[RequestRows], cache: KVCache, num_blocks: int) -> None:
    """Shrink drafts that have slots already, the last request's first, until `num_blocks` are free or no draft is left."""
    for rows in reversed(batch):
        if cache.pool.num_free >= num_blocks:
            return
        if rows.plan is not None and rows.num_draft_tokens > 0:
            cache.cancel(rows.request.sequence)
            _shrink(rows, cache, cache.pool.num_free - num_blocks)
            rows.plan = cache.reserve(rows.request.sequence, rows.parents, rows.num_known)


def _shrink(rows: RequestRows, cache: KVCache, num_blocks: int) -> None:
    """Keep as much of a draft as fits in `num_blocks` blocks."""
    tree = rows.tree
    if tree is None or tree.num_draft_tokens == 0:
        return
    sequence = rows.request.sequence
    kept = tree.prune(lambda parents: cache.num_blocks_needed(sequence, rows.parents_with(parents)) <= num_blocks)
    rows.set_draft(kept, tree.num_draft_tokens, SkipReason.NO_MEMORY)
