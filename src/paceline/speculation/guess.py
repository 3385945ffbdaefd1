"""Asking the drafter, and making sure that nothing it says or fails to say can do harm."""

import logging
import time
from collections.abc import Sequence

from paceline.kv_cache.row_plan import TreeLayout
from paceline.speculation.draft_length import DraftLengthPolicy
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter
from paceline.speculation.request import Request
from paceline.speculation.stats import PlainReason
from paceline.speculation.tree import DraftTree
from paceline.speculation.work import Work

log = logging.getLogger(__name__)


class Guesser:
    """A drafter, how much it may draft, and the fallback to plain steps.

    Args:
        drafter: None for plain decoding.
        vocab_size: ids the tokenizer knows; rows of the model beyond them are padding, never emitted, and guesses of them are cut.
        layout: how trees are laid out, which decides what they cost.
    """

    def __init__(self, drafter: Drafter | None, policy: DraftLengthPolicy, *, vocab_size: int, layout: TreeLayout) -> None:
        self.drafter, self.policy = drafter, policy
        self.vocab_size, self._layout = vocab_size, layout
        self._has_warned = False

    def guess(self, works: Sequence[Work]) -> None:
        """Hang a tree under the root of every work that may draft; the others get the reason why not."""
        asked: list[tuple[Work, DraftBudget]] = []
        for work in works:
            budget = self._budget(work)
            if isinstance(budget, PlainReason):
                work.plain = budget
            elif budget is not None:
                asked.append((work, budget))
        if self.drafter is not None and asked:
            self._ask(self.drafter, asked)

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        """Pass on what a target pass made permanent."""
        if self.drafter is None:
            return
        try:
            self.drafter.observe(rows)
        except Exception as error:  # a drafter may fail in any way; the target goes on without it
            self._warn(error)

    def release(self, request: Request) -> None:
        """Forget a request that ended."""
        self.policy.release(request)
        if self.drafter is None:
            return
        try:
            self.drafter.release(request)
        except Exception as error:  # as in `observe`
            self._warn(error)

    def _budget(self, work: Work) -> DraftBudget | PlainReason | None:
        if work.tree is None:
            return None
        if work.num_given > 1 or work.request.num_output_tokens == 0:
            return PlainReason.PROMPT
        if self.drafter is None:
            return PlainReason.OFF
        room = work.request.num_remaining_tokens - 1  # the bonus token takes one
        if room < 1:
            return PlainReason.NO_ROOM
        budget = self.policy.budget(work.request)
        return PlainReason.GUARD if budget is None else DraftBudget(budget.row_budget, min(budget.max_depth, room), self._layout)

    def _ask(self, drafter: Drafter, asked: list[tuple[Work, DraftBudget]]) -> None:
        start = time.perf_counter()
        try:
            trees = drafter.propose([work.request for work, _ in asked], [budget for _, budget in asked])
            for (work, budget), tree in zip(asked, trees, strict=True):
                self._take(work, tree, budget)
        except Exception as error:  # as in `observe`
            self._warn(error)
            for work, _ in asked:
                work.make_plain(PlainReason.DRAFTER_FAILED)
            return
        if any(work.plain is None for work, _ in asked):
            self.policy.observe_draft_time(time.perf_counter() - start)

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

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            log.warning("the drafter failed (%s: %s); steps without its guesses are plain", type(error).__name__, error)
            self._has_warned = True
