"""Makes the drafts of one step, within the limits of requests, pass, cache and grammars. Exceptions of drafters do not fail the step.

Lookup drafters are called first because they take next to no time. A later drafter is called for a request if the policy expects more
accepted tokens from it than from the draft that the request has; the better draft is kept. Then drafts shrink to the rows that the pass and
the free cache blocks allow.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from types import TracebackType

from paceline.errors import CapacityError, PacelineError, is_interrupt, printable
from paceline.kv_cache.cache import KVCache
from paceline.kv_cache.row_plan import RowPlan
from paceline.speculation.constrained import constrain_draft
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import SkipReason

MAX_FAILURE_BACKOFF_STEPS = 64  # maximum number of steps until a drafter that keeps failing is called again

log = logging.getLogger(__name__)


class ErrorGuard(AbstractContextManager["ErrorGuard"]):
    """Context manager that suppresses and counts exceptions, and logs the first one. Interrupts are not suppressed."""

    def __init__(self) -> None:
        self.num_failures = 0

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        return error is not None and self.count_and_suppress(error)

    def count_and_suppress(self, error: BaseException) -> bool:
        """Count an exception; return False if it is an interrupt, which must not be suppressed."""
        if is_interrupt(error):
            return False
        if self.num_failures == 0:
            log.warning("a drafter failed (%s); steps without its drafts are plain", _error_text(error))
        self.num_failures += 1
        return True


class Proposer:
    """Calls the drafters.

    Args:
        drafters: drafters in the order in which they are called, except that lookup drafters come first.
        guard: suppresses exceptions of drafters and policy.
        vocab_size: as for `Speculator`.

    Attributes:
        draft_s, plan_s: seconds that the last `propose` spent in drafters, and in everything else.
    """

    def __init__(self, drafters: Sequence[Drafter], guard: ErrorGuard, *, vocab_size: int) -> None:
        # names are read once, because `name` may be a property of a user's drafter that raises later
        self._drafters = [(drafter.name, drafter) for drafter in sorted(drafters, key=lambda drafter: not drafter.traits.is_lookup)]
        self.draft_s = self.plan_s = 0.0
        self._guard, self._vocab_size = guard, vocab_size
        self._pauses: dict[str, tuple[int, int]] = {}  # drafters that failed: number of failures in a row, steps left until the next call

    def propose(self, batch: Sequence[RequestRows], policy: FixedDraftLength, max_rows: int | None, *, is_rejection: bool) -> None:
        """Set the draft of every request, or the reason why it has none.

        Args:
            batch: all rows of the pass.
            policy: decides how much is drafted.
            max_rows: maximum number of rows of the pass, drafts included; None = no limit.
            is_rejection: whether draft tokens are accepted by rejection sampling, which needs `draft_probs` at temperatures above 0.
        """
        start_s, self.draft_s = perf_counter(), 0.0
        reason: SkipReason | None = SkipReason.DRAFTER_FAILED
        with self._guard:
            reason = policy.begin_step(batch)
        for rows in batch:
            rows.skip_reason, rows.max_draft_budget = self._skip_reason_or_budget(rows, policy, is_rejection=is_rejection)
            with self._guard:
                constrain_draft(rows)  # the first draft: tokens that the grammar forces; a drafter's draft may replace it
        if reason is None:
            for name, drafter in self._drafters:
                self._call_drafter_guarded(name, drafter, batch, policy, max_rows)
        for rows in batch:
            if rows.max_draft_budget is not None and rows.skip_reason is None and rows.num_draft_tokens == 0:
                rows.skip_reason = reason or SkipReason.NO_MATCH
            with self._guard:
                constrain_draft(rows)  # drop tokens that the grammar forbids from the drafters' drafts, and add forced tokens
        if any(rows.num_draft_tokens for rows in batch):
            with self._guard:
                policy.prune_drafts(batch, max_rows)
            if max_rows is not None:
                fit_rows(batch, max_rows - sum(rows.num_new_tokens for rows in batch))
        self.plan_s = perf_counter() - start_s - self.draft_s

    def _skip_reason_or_budget(
        self, rows: RequestRows, policy: FixedDraftLength, *, is_rejection: bool
    ) -> tuple[SkipReason | None, DraftBudget | None]:
        """Return the draft budget of a request, or the reason why nothing may be drafted for the request."""
        request = rows.request
        if rows.tree is None:
            return None, None
        if request.num_output_tokens == 0:
            return SkipReason.PROMPT, None
        if rows.num_new_tokens != 1:
            return SkipReason.RESUMED, None
        if not request.is_speculative or not self._drafters:
            return SkipReason.OFF, None
        if request.num_remaining_tokens < 2:  # the last token of a step is always the bonus token
            return SkipReason.NO_ROOM, None
        max_rows, max_depth = request.limit_draft(policy.max_rows, policy.num_speculative_tokens)
        return None, DraftBudget(max_rows, max_depth, is_rejection and not request.params.is_greedy)

    def _call_drafter_guarded(
        self, name: str, drafter: Drafter, batch: Sequence[RequestRows], policy: FixedDraftLength, max_rows: int | None
    ) -> None:
        """Call a drafter unless it failed recently. After 1, 2, 3, 4, … failures in a row it is not called for 0, 1, 3, 7, … steps."""
        num_failures, num_steps_left = self._pauses.get(name, (0, 0))
        is_failed = num_steps_left > 0
        if is_failed:
            self._pauses[name] = num_failures, num_steps_left - 1
        else:
            try:
                if self._call_drafter(name, drafter, batch, policy, max_rows):
                    self._pauses.pop(name, None)
            except BaseException as error:
                if not self._guard.count_and_suppress(error):
                    raise
                self._pauses[name] = num_failures + 1, min(MAX_FAILURE_BACKOFF_STEPS, 2 ** min(num_failures, 10) - 1)
                is_failed = True
        for rows in batch:
            rows.draft_budget = None
            if is_failed and _may_draft(rows, name):
                rows.skip_drafter(SkipReason.DRAFTER_FAILED)

    def _call_drafter(
        self, name: str, drafter: Drafter, batch: Sequence[RequestRows], policy: FixedDraftLength, max_rows: int | None
    ) -> bool:
        """Let a drafter draft for all requests for which drafting is expected to pay; return False if there are none."""
        for rows in batch:
            if not _may_draft(rows, name):
                continue
            if (reason := policy.skip_reason(rows.request, drafter)) is not None:
                rows.skip_drafter(reason)
            elif not drafter.has_candidates(rows.request):
                rows.skip_drafter(SkipReason.NO_MATCH)
            else:
                rows.draft_budget = rows.max_draft_budget
        if all(rows.draft_budget is None for rows in batch):
            return False
        policy.plan_drafts(batch, drafter, max_rows)
        drafting = [(rows, rows.draft_budget) for rows in batch if rows.draft_budget is not None]
        if not drafting:
            return False
        has_prefill = any(drafter.prefill_s(rows.request) > 0.0 for rows, _ in drafting)
        start_s = perf_counter()
        states_before = [(len(rows.request.token_ids), rows.request.token_ids[-1]) for rows, _ in drafting]
        try:
            trees = drafter.propose([rows.request for rows, _ in drafting], [budget for _, budget in drafting])
        finally:
            are_unchanged = [_restore_token_ids(rows, *state, name) for (rows, _), state in zip(drafting, states_before, strict=True)]
        if not all(are_unchanged):
            raise ValueError(f"{name} changed Request.token_ids, which drafters may only read")
        depth = 0
        for (rows, budget), tree in zip(drafting, trees, strict=True):
            if tree is None or tree.num_draft_tokens == 0:
                rows.skip_drafter(SkipReason.NO_MATCH)
                continue
            tree.check()
            depth = max(depth, tree.tree_depth)
            usable = tree.trim(vocab_size=self._vocab_size, max_depth=budget.max_depth, max_rows=budget.max_rows)
            is_better = policy.is_better_draft(rows, usable) if usable.num_draft_tokens else rows.num_draft_tokens == 0
            if is_better:
                rows.set_draft(usable, tree.num_draft_tokens, SkipReason.UNUSABLE)
        seconds = perf_counter() - start_s
        self.draft_s += seconds
        policy.observe_draft_time(drafter, len(drafting), depth, seconds, has_prefill=has_prefill)
        return True


def _error_text(error: BaseException) -> str:
    """Return the type and text of an exception as one printable line."""
    try:
        return printable(f"{type(error).__name__}: {error}")
    except Exception:  # `__str__` of a user's exception may raise too
        return type(error).__name__


def _restore_token_ids(rows: RequestRows, num_tokens: int, last_token_id: int, name: str) -> bool:
    """Return whether a request has as many tokens and the same last token as before drafter `name` was called.

    If not, appended tokens are removed. A request that has lost tokens fails: tokens are appended up to the length that the pass reads, and
    `step` frees the rows.
    """
    token_ids = rows.request.token_ids
    if len(token_ids) == num_tokens and token_ids[-1] == last_token_id:
        return True
    del token_ids[num_tokens:]
    if len(token_ids) < num_tokens or token_ids[-1] != last_token_id:
        token_ids[-1:] = [last_token_id] * (num_tokens + 1 - max(1, len(token_ids)))
        text = f"the drafter {name} removed or replaced tokens of this request, which drafters may only read: load the model without it"
        rows.request.fail(PacelineError(text))
        rows.max_draft_budget = None
        rows.drop_draft(SkipReason.DRAFTER_FAILED)
    return False


def _may_draft(rows: RequestRows, name: str) -> bool:
    """Return whether a drafter may draft for a request.

    If the request has a sampled draft, no other drafter may. A choice between drafts that depends on sampled tokens would change the
    distribution that rejection sampling preserves.
    """
    is_sampled = rows.tree is not None and bool(rows.tree.draft_probs)
    return rows.max_draft_budget is not None and rows.request.drafter in (None, name) and not is_sampled


def fit_rows(batch: Sequence[RequestRows], max_draft_tokens: int) -> None:
    """Prune drafts to `max_draft_tokens` in total, shared among requests as evenly as the sizes of their drafts allow."""
    sizes = [rows.num_draft_tokens for rows in batch]
    if sum(sizes) <= max_draft_tokens:
        return
    shares, num_left = [0] * len(sizes), max(0, max_draft_tokens)
    while num_left > 0 and (unfilled := [index for index, size in enumerate(sizes) if shares[index] < size]):
        for index in unfilled[:num_left]:
            shares[index] += 1
        num_left -= len(unfilled[:num_left])
    for rows, size, share in zip(batch, sizes, shares, strict=True):
        if share < size and rows.tree is not None:
            pruned = rows.tree.prune(lambda parents, share=share: len(parents) - 1 <= share)  # type: ignore[misc]
            rows.set_draft(pruned, rows.num_draft_tokens, SkipReason.PASS_FULL)


def reserve_rows(batch: Sequence[RequestRows], cache: KVCache) -> list[RowPlan]:
    """Reserve cache slots for all rows of a pass. If there are too few blocks, drafts shrink until the remaining rows fit.

    Raises:
        CapacityError: the rows without drafts do not fit; nothing was changed.
    """
    try:
        for rows in batch:
            sequence = rows.request.cached_sequence
            try:
                rows.row_plan = cache.reserve_rows(sequence, rows.parents, rows.num_new_tokens)
            except CapacityError:
                _shrink_reserved_drafts(batch, cache, cache.num_blocks_needed(sequence, range(-1, rows.root_node)))
                _shrink_draft(rows, cache, cache.pool.num_free)
                rows.row_plan = cache.reserve_rows(sequence, rows.parents, rows.num_new_tokens)
    except BaseException:
        for rows in batch:
            cache.drop_reserved_rows(rows.request.cached_sequence)
        raise
    return [rows.row_plan for rows in batch if rows.row_plan is not None]


def _shrink_reserved_drafts(batch: Sequence[RequestRows], cache: KVCache, num_blocks: int) -> None:
    """Shrink drafts with reserved slots, beginning with the last request's, until `num_blocks` are free or no draft is left."""
    for rows in reversed(batch):
        if cache.pool.num_free >= num_blocks:
            return
        if rows.row_plan is not None and rows.num_draft_tokens > 0:
            cache.drop_reserved_rows(rows.request.cached_sequence)
            _shrink_draft(rows, cache, cache.pool.num_free - num_blocks)
            rows.row_plan = cache.reserve_rows(rows.request.cached_sequence, rows.parents, rows.num_new_tokens)


def _shrink_draft(rows: RequestRows, cache: KVCache, num_blocks: int) -> None:
    """Prune a draft so that the request's rows fit in `num_blocks` blocks."""
    tree, sequence = rows.tree, rows.request.cached_sequence
    if tree is not None and tree.num_draft_tokens > 0:
        pruned = tree.prune(lambda parents: cache.num_blocks_needed(sequence, rows.parents_of_pass(parents)) <= num_blocks)
        rows.set_draft(pruned, tree.num_draft_tokens, SkipReason.NO_MEMORY)
