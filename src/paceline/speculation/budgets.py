"""How much each request of a step may draft: within its own limits, and all together within the rows of the pass."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import PlainReason


def reason_not_to_draft(rows: RequestRows, *, has_drafter: bool) -> PlainReason | None:
    """Why nothing may be guessed under a request's root, whatever the policy says; of rows that reach it."""
    request = rows.request
    num_tokens = len(request.token_ids)
    if rows.num_known != 1 or num_tokens == request.num_prompt_tokens:
        return PlainReason.RESUMED if request.num_preemptions and request.num_output_tokens else PlainReason.PROMPT
    if not has_drafter or request.speculation.is_off:
        return PlainReason.OFF
    return PlainReason.NO_ROOM if request.max_len - num_tokens < 2 else None  # the bonus token takes one


def within_limits(request: Request, row_budget: int, max_depth: int) -> tuple[int, int]:
    """(row budget, depth) as far as they are of use to a request: no deeper than its end, no more than it allows to draft."""
    max_depth = min(max_depth, request.num_remaining_tokens - 1)
    allowed = request.speculation.max_draft_tokens
    return (row_budget, max_depth) if allowed is None else (min(row_budget, allowed + 1), min(max_depth, allowed))


def share_budgets(batch: Sequence[RequestRows], available: int) -> None:
    """Make budgets smaller until together they fit the `available` rows that a pass has left for guesses."""
    drafting = [(rows, rows.budget) for rows in batch if rows.budget is not None]
    wanted = [budget.row_budget - 1 for _, budget in drafting]
    if sum(wanted) <= available:
        return
    shares = share_rows(wanted, available)
    for (rows, budget), share in zip(drafting, shares, strict=True):
        if share > 0:
            rows.budget = replace(budget, row_budget=share + 1)
        else:
            rows.budget, rows.plain_reason = None, PlainReason.FULL_PASS


def fit_rows(batch: Sequence[RequestRows], available: int) -> None:
    """Cut guesses that are more than the `available` rows which a pass has left for them, those that grammars force among them."""
    wanted = [rows.num_guesses for rows in batch]
    if sum(wanted) <= available:
        return
    for rows, count, share in zip(batch, wanted, share_rows(wanted, available), strict=True):
        if share < count and rows.tree is not None:
            kept = rows.tree.prune(lambda parents, share=share: len(parents) <= share + 1)  # type: ignore[misc]
            rows.set_guesses(kept, count, PlainReason.FULL_PASS)


def share_rows(wanted: Sequence[int], available: int) -> list[int]:
    """Divide the draft rows of a pass among its requests as evenly as what each could use allows; the first ones get what is left over.

    Args:
        wanted: draft rows each request could use, the root not counted.
        available: rows to divide.

    Returns:
        rows for each, in order.
    """
    shares = [0] * len(wanted)
    left = max(0, available)
    while left > 0 and (open_ones := [index for index, most in enumerate(wanted) if shares[index] < most]):
        for index in open_ones[:left]:
            shares[index] += 1
        left -= len(open_ones[:left])
    return shares
