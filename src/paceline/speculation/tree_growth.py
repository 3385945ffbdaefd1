"""Growth of draft trees: of all candidates, the one with the greatest path probability is added, until the rows are used up.

The path probability of a node is the probability that it and all tokens before it are accepted.
"""

import heapq
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from paceline.kv_cache.row_plan import is_chain
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.tree import DraftTree

ContextT = TypeVar("ContextT")

Candidate: TypeAlias = tuple[int, float, ContextT]
"""A possible next token: its id, its probability given that the tokens before it are accepted, and the context from which later tokens
are proposed. A plain tuple, because some drafters take only microseconds."""

MIN_COUPLED_PROB = 0.6
"""Minimum confidence in a token that the drafter sampled with the target's own noise. Such a token is accepted more often than its
probability under the drafter suggests."""

TreeGenerator: TypeAlias = Generator[ContextT, Sequence[Candidate[ContextT]], DraftTree | None]
"""Generator that yields the context of a node, receives the candidates for its children, and finally returns the tree."""


def grow_tree(
    root_token_id: int,
    budget: DraftBudget,
    context: ContextT,
    expand: Callable[[ContextT], Sequence[Candidate[ContextT]]],
    source: str,
    *,
    min_path_prob: float = 0.0,
) -> DraftTree | None:
    """Return the tree of the candidates with the greatest path probability; None if no candidate fits.

    Args:
        budget: rows and depth of the tree.
        context: context of the root, passed to `expand`.
        expand: returns the candidates after a context, each token at most once. Called for nodes of the tree only.
        source: name of the drafter.
        min_path_prob: candidates with a smaller path probability are left out.
    """
    growth = grow_tree_stepwise(root_token_id, budget, context, source, min_path_prob=min_path_prob)
    try:
        context = next(growth)
        while True:
            context = growth.send(expand(context))
    except StopIteration as stop:
        tree: DraftTree | None = stop.value
        return tree


def grow_tree_stepwise(
    root_token_id: int, budget: DraftBudget, context: ContextT, source: str, *, min_path_prob: float = 0.0
) -> TreeGenerator[ContextT]:
    """Grow a tree like `grow_tree`, but as a generator, so that a drafter can expand nodes of many trees in one batch.

    A node is expanded as soon as it is added, because its children compete with the other candidates.
    """
    token_ids, parents, depths, probs = [root_token_id], [-1], [0], [1.0]
    # (-path probability, order of arrival, parent, candidate); the order of arrival makes ties deterministic
    heap: list[tuple[float, int, int, Candidate[ContextT]]] = []
    num_arrived, node, path_prob, is_expandable = 0, 0, 1.0, budget.max_depth > 0
    while len(token_ids) < budget.max_rows:
        if is_expandable:
            for candidate in (yield context):
                child_path_prob = path_prob * candidate[1]
                if child_path_prob > 0.0 and child_path_prob >= min_path_prob:
                    heapq.heappush(heap, (-child_path_prob, num_arrived, node, candidate))
                    num_arrived += 1
        if not heap:
            break
        negative_path_prob, _, parent, (token_id, prob, context) = heapq.heappop(heap)
        node, path_prob = len(token_ids), -negative_path_prob
        token_ids.append(token_id)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        probs.append(min(prob, 1.0))
        is_expandable = depths[node] < budget.max_depth
    if len(token_ids) == 1:
        return None
    if is_chain(parents):
        return DraftTree.chain(root_token_id, token_ids[1:], source, probs[1:])
    return DraftTree.from_nodes(root_token_id, token_ids[1:], parents[1:], source, confidences=probs[1:])
