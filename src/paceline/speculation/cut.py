"""Leaving guesses out of a step that are not worth their rows."""

from collections.abc import Sequence

from paceline.kv_cache.row_plan import TreeLayout, is_chain
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import PlainReason

SHADOW_TOKENS = 4  # of guesses that are not sent: until the text has gone past them nobody is asked again


def can_cut(rows: RequestRows) -> bool:
    """Whether single guesses may be left out: not of drawn ones, whose distribution would change, nor where a branch takes rows of its
    own."""
    tree, budget = rows.tree, rows.budget
    if tree is None or budget is None or tree.draft_probs:
        return False
    return rows.request.acceptance is not None and (budget.layout is TreeLayout.MASK or is_chain(tree.parents))


def cut(rows: RequestRows, nodes: Sequence[int]) -> None:
    """Keep these nodes of a request's tree; what is left out entirely is compared with the text as it comes."""
    tree, own = rows.tree, rows.request.acceptance
    if tree is None or len(nodes) == len(tree.parents):
        return
    if len(nodes) > 1:
        rows.tree = tree.part(nodes)
        return
    if own is not None:
        path = tree.first_path()[:SHADOW_TOKENS]
        probs = None if tree.probs is None else [tree.probs[node] for node in path]
        own.shadow = len(rows.request.token_ids), [tree.token_ids[node] for node in path], probs
    rows.make_plain(PlainReason.DID_NOT_PAY)
    rows.expected_speedup = 1.0  # at best
