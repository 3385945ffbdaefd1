"""How much each request of a step may draft: within its own limits, and all together within the rows of the pass."""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heapreplace

from paceline.speculation.draft_length import DraftLengthPolicy
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import PlainReason


def reason_not_to_draft(rows: RequestRows, *, has_drafter: bool) -> PlainReason | None:
    """Why nothing may be guessed under a request's root, whatever the policy says."""
    request = rows.request
    if not rows.is_decoding or request.num_output_tokens == 0:
        return PlainReason.RESUMED if request.num_preemptions and request.num_output_tokens else PlainReason.PROMPT
    if not has_drafter or request.speculation.is_off:
        return PlainReason.OFF
    return PlainReason.NO_ROOM if request.num_remaining_tokens < 2 else None  # the bonus token takes one


def within_limits(request: Request, row_budget: int, max_depth: int) -> tuple[int, int]:
    """(row budget, depth) as far as they are of use to a request: no deeper than its end, no more than it allows to draft."""
    max_depth = min(max_depth, request.num_remaining_tokens - 1)
    allowed = request.speculation.max_draft_tokens
    return (row_budget, max_depth) if allowed is None else (min(row_budget, allowed + 1), min(max_depth, allowed))


def share_budgets(batch: Sequence[RequestRows], available: int, policy: DraftLengthPolicy) -> None:
    """Make budgets smaller until together they fit the `available` rows that a pass has left for guesses."""
    drafting = [(rows, rows.budget) for rows in batch if rows.budget is not None]
    wanted = [budget.row_budget - 1 for _, budget in drafting]
    if sum(wanted) <= available:
        return
    shares = share_rows(wanted, [policy.acceptance(rows.request) for rows, _ in drafting], available)
    for (rows, budget), share in zip(drafting, shares, strict=True):
        if share > 0:
            rows.budget = replace(budget, row_budget=share + 1)
        else:
            rows.budget, rows.plain_reason = None, PlainReason.FULL_PASS


def share_rows(wanted: Sequence[int], acceptance: Sequence[float], available: int) -> list[int]:
    """Divide the draft rows of a pass among its requests so that most tokens are to be expected.

    The i-th draft row of a request brings a token with probability acceptance^i, if its drafts are a chain. So each row goes to the request
    that gains most by it; where all gain alike, to the one with the fewest.

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
