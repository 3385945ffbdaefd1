"""How much to draft: what every policy answers, and the policy that always drafts the same. Decisions change speed, never tokens."""

from collections.abc import Sequence

from paceline.speculation.budgets import share_budgets
from paceline.speculation.drafter import Drafter
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import PlainReason
from paceline.speculation.tree import DraftTree


class DraftLengthPolicy:
    """A fixed draft length, whether or not it pays.

    Args:
        num_draft_tokens: depth of a draft.
        row_budget: rows of the target pass a tree may cost, root included; None = a chain's.
    """

    def __init__(self, num_draft_tokens: int, *, row_budget: int | None = None) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.row_budget = row_budget if row_budget is not None else num_draft_tokens + 1

    def plan(self, batch: Sequence[RequestRows], drafting: Sequence[tuple[RequestRows, Drafter]], max_rows: int | None) -> None:
        """Make the budgets of a step smaller, or None with the reason, before anybody guesses.

        Args:
            batch: all rows of the pass.
            drafting: those under whose roots may be guessed, with the most that may in `budget`, and who would guess.
            max_rows: of the pass; None = no limit.
        """
        if max_rows is not None:
            share_budgets([rows for rows, _ in drafting], max_rows - sum(rows.num_known for rows in batch))

    def select(self, batch: Sequence[RequestRows], max_rows: int | None) -> None:
        """Cut what was guessed and is not worth its rows.

        Args:
            batch, max_rows: as for `plan`.
        """

    def observe(self, request: Request, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        """Told what became of a tree."""

    def observe_draft(self, drafter: Drafter, num_requests: int, depth: int, seconds: float, read_s: float) -> None:
        """Told how long guessing took: `seconds` without the `read_s` for what was not seen before."""

    def observe_step(self, batch: Sequence[RequestRows], pass_s: float, host_s: float, draft_s: float = 0.0, plan_s: float = 0.0) -> None:
        """Told after a step how long its target pass took, its other work, guessing, and deciding how much to guess."""

    def rests_together(self, batch: Sequence[RequestRows]) -> bool:
        """Whether nothing is to be guessed for any request in this step, of which each then has the reason; asked first in a step."""
        return False

    def rests(self, request: Request) -> PlainReason | None:
        """Why nothing is to be guessed for a request in this step, before anything else is thought of; None = it may be. Asked once a
        step, but for steps that all rest together."""
        return None

    def note_no_guess(self, request: Request, drafter: Drafter) -> None:
        """Told that a request's drafter had nothing to guess from in this step."""

    def release(self, request: Request) -> None:
        """Forget a request."""

    def describe(self) -> str:
        """How much is drafted, for the banner."""
        return f"{self.num_draft_tokens} draft tokens a step"
