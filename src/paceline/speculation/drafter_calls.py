"""Calling drafters, which may fail in any way: what they raise is counted and logged, and the step goes on without their guesses."""

import logging
import math
from collections.abc import Sequence
from time import perf_counter
from types import TracebackType

from paceline.errors import is_interrupt
from paceline.speculation.backoff import Backoff
from paceline.speculation.draft_length import DraftLengthPolicy
from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import PlainReason
from paceline.speculation.tree import DraftTree

log = logging.getLogger(__name__)


class Tolerated:
    """`with` it, whatever is raised is counted, and logged the first time; interrupts go on. May be nested."""

    def __init__(self) -> None:
        self.num_failures = 0
        self._has_warned = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        return error is not None and self.bears(error)

    def bears(self, error: BaseException) -> bool:
        """Whether an error is borne, which is counted then: for those who ask in every step, to whom a `with` takes too long."""
        if is_interrupt(error):
            return False
        self.num_failures += 1
        if not self._has_warned:
            log.warning("the drafter failed (%s: %s); steps without its guesses are plain", type(error).__name__, error)
            self._has_warned = True
        return True


class DrafterCalls:
    """Calls drafters and bears their failures.

    Args:
        vocab_size: guessed ids from here on are cut.

    Attributes:
        tolerated: what drafters may do within it; counts how often one raised or answered nonsense.
        seconds: spent in drafters so far.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.tolerated = Tolerated()
        self.seconds = 0.0
        self._backoffs: dict[str, Backoff] = {}

    def propose(self, drafter: Drafter, batch: Sequence[RequestRows], policy: DraftLengthPolicy) -> None:
        """Hang a drafter's trees under the roots of `batch`; plain steps where it fails, or failed lately."""
        backoff, is_done = self._backoffs.setdefault(drafter.name, Backoff()), False
        if backoff.is_due():
            with self.tolerated:
                self._propose(drafter, batch, policy)
                is_done = True
            backoff.note(failed=not is_done)
        if not is_done:
            for rows in batch:
                rows.make_plain(PlainReason.DRAFTER_FAILED)

    def _propose(self, drafter: Drafter, batch: Sequence[RequestRows], policy: DraftLengthPolicy) -> None:
        asked: list[tuple[RequestRows, DraftBudget]] = []
        for rows in batch:
            if rows.budget is not None and drafter.may_guess(rows.request, rows.budget.max_reading_s):
                asked.append((rows, rows.budget))
            else:
                rows.plain_reason = PlainReason.DID_NOT_PAY
        if not asked:
            return
        unread = [rows.request for rows, budget in asked if budget.max_reading_s < math.inf]
        unread_s = sum(map(drafter.reading_s, unread))
        start_s = perf_counter()
        trees = drafter.propose([rows.request for rows, _ in asked], [budget for _, budget in asked])
        for (rows, budget), tree in zip(asked, trees, strict=True):
            self._take(rows, budget, tree)
        seconds = perf_counter() - start_s
        self.seconds += seconds
        read_s = max(0.0, unread_s - sum(map(drafter.reading_s, unread)))
        deepest = max([rows.tree.tree_depth for rows, _ in asked if rows.tree is not None], default=0)
        if (depth := drafter.timed_depth(deepest)) is not None:
            policy.observe_draft(drafter, len(asked), depth, max(0.0, seconds - read_s), read_s)

    def _take(self, rows: RequestRows, budget: DraftBudget, tree: DraftTree | None) -> None:
        """Hang a tree without what cannot be used: ids that do not exist, nodes too deep or over budget.

        Raises:
            ValueError: it is no tree.
        """
        if tree is None or tree.num_draft_tokens == 0:
            rows.make_plain(PlainReason.NO_GUESS)
            return
        tree.check()
        usable = tree.trim(vocab_size=self.vocab_size, max_depth=budget.max_depth, row_budget=budget.row_budget, layout=budget.layout)
        rows.set_guesses(usable, tree.num_draft_tokens, PlainReason.CUT)
