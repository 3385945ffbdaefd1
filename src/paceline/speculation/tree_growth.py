"""Growth of draft trees from candidates: nodes are added in the order of probability per added row, until the row budget is used.

The probability of a node is that its whole path is accepted. A child of a leaf adds one row to the target's pass. A sibling adds one row if
trees are masked. If each path has its own cache rows, it adds a row for every token of its path, so a branch must be worth several rows.
"""

import heapq
import sys
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from paceline.kv_cache.row_plan import TreeLayout, is_chain
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.tree import DraftTree

ContextT = TypeVar("ContextT")

Candidate: TypeAlias = tuple[int, float, str, ContextT]
"""A possible next token: its id, its probability given that the tokens before it are accepted, the name of its drafter, and the context
from which the tokens after it are found. A bare tuple, because some drafters take only microseconds."""

COUPLED_PROB = 0.6
"""Least probability assumed for a token that was drawn with the target's own noise: it agrees with the target more often than its
probability under the drafter suggests."""

Growth: TypeAlias = Generator[ContextT, Sequence[Candidate[ContextT]], DraftTree | None]
"""Generator that yields the context of a node, receives the candidates after it, and returns the tree."""


def grow_tree(
    root_token_id: int,
    budget: DraftBudget,
    context: ContextT,
    expand: Callable[[ContextT], Sequence[Candidate[ContextT]]],
    *,
    least_prob: float = 0.0,
) -> DraftTree | None:
    """Return the tree of the most probable nodes per row; None if no candidate is usable.

    Args:
        budget: rows, depth and layout of the tree.
        context: context of the root, passed to `expand`.
        expand: returns the candidates after a context, no token twice. Only called for nodes of the tree while rows are left.
        least_prob: nodes below this probability are left out.
    """
    growth = growing_tree(root_token_id, budget, context, least_prob=least_prob)
    try:
        context = next(growth)
        while True:
            context = growth.send(expand(context))
    except StopIteration as end:
        tree: DraftTree | None = end.value
        return tree


def growing_tree(root_token_id: int, budget: DraftBudget, context: ContextT, *, least_prob: float = 0.0) -> Growth[ContextT]:
    """Do as `grow_tree`, as a generator, so that a drafter can expand nodes of many trees in one batch.

    A node is expanded as soon as it is added, because a candidate after it may be the most probable of all.
    """
    token_ids, parents, depths, sources, probs = [root_token_id], [-1], [0], [""], [1.0]
    has_child = [False]

    def added_rows(parent: int) -> int:
        """Return the rows that one more child of `parent` adds."""
        if not has_child[parent] or budget.layout is TreeLayout.MASK:
            return 1
        return depths[parent] + 2 if budget.layout is TreeLayout.PATHS else sys.maxsize

    rows_left = budget.row_budget - 1
    # (-probability per row, order of arrival, probability, parent, candidate); the order of arrival makes ties deterministic
    queue: list[tuple[float, int, float, int, Candidate[ContextT]]] = []
    num_arrived, node, reach, is_expandable = 0, 0, 1.0, budget.max_depth > 0
    while rows_left > 0:
        if is_expandable:
            for candidate in (yield context):
                prob = reach * candidate[1]
                if prob > 0.0 and prob >= least_prob:
                    heapq.heappush(queue, (-prob, num_arrived, prob, node, candidate))
                    num_arrived += 1
        if not queue:
            break
        value, order, reach, parent, candidate = heapq.heappop(queue)
        is_expandable, num_added = False, added_rows(parent)
        if num_added > rows_left:  # its cost never falls
            continue
        if -value > reach / num_added:  # a sibling was added since this candidate was queued, so its row costs more now
            heapq.heappush(queue, (-reach / num_added, order, reach, parent, candidate))
            continue
        token_id, own_prob, source, context = candidate
        node = len(token_ids)
        has_child[parent] = True
        has_child.append(False)
        token_ids.append(token_id)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        sources.append(source)
        probs.append(min(own_prob, 1.0))
        rows_left -= num_added
        is_expandable = depths[node] < budget.max_depth
    if len(token_ids) == 1:
        return None
    if is_chain(parents):
        return DraftTree(token_ids, parents, depths, sources, {}, probs)
    return DraftTree.grow(root_token_id, token_ids[1:], parents[1:], sources[1:], probs=probs[1:])
