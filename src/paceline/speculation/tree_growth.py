"""Growing a draft tree by expected tokens per row it adds to the target pass, within a budget of rows.

A node of probability p (of being accepted, its whole path included) brings p tokens. What it costs depends on the layout and on
where it hangs: under a leaf one row; next to a sibling one row with a mask, but a whole path of its own with paths. So with paths a
branch must be worth several rows, and a chain wins most of the time.
"""

import heapq
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from paceline.kv_cache.row_plan import TreeLayout, is_chain
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.tree import DraftTree

ContextT = TypeVar("ContextT")

Candidate: TypeAlias = tuple[int, float, str, ContextT]
"""One possible next token: its id, the estimated probability that the target says it once it said everything before, its drafter, and
the context to expand for the tokens after it. A bare tuple, because some drafters take microseconds."""

COUPLED_PROB = 0.6
"""How likely, at least, a token drawn with the target's own noise is taken to be the target's; its own probability says too little."""

Growth: TypeAlias = Generator[ContextT, Sequence[Candidate[ContextT]], DraftTree | None]
"""Generator of a tree: yields the context of a node, is sent the candidates after it, and returns the tree."""


def grow_tree(
    root_token_id: int,
    budget: DraftBudget,
    context: ContextT,
    expand: Callable[[ContextT], Sequence[Candidate[ContextT]]],
    *,
    least_prob: float = 0.0,
) -> DraftTree | None:
    """The tree whose nodes were taken best first, by probability per added row; None when it has no node but the root.

    Args:
        budget: rows, depth and layout; the tree keeps to all three.
        context: of the root.
        expand: context of a node -> candidates after it, no token twice. Called for nodes of the tree only, while a row is left.
        least_prob: nodes less likely than this, their path included, are left out.
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
    """The same as a generator, so that a drafter can expand the nodes of many trees in one pass.

    A node is expanded when it is taken, if a row is left: a certain candidate after it would then be the best of all.
    """
    tree = _Growing([root_token_id], budget.layout)
    rows_left = budget.row_budget - 1
    # (-probability per row, order of arrival, probability, parent, candidate); the order keeps ties and results the same in every run
    queue: list[tuple[float, int, float, int, Candidate[ContextT]]] = []
    arrived, node, reached, is_open = 0, 0, 1.0, budget.max_depth > 0
    while rows_left > 0:
        if is_open:
            for candidate in (yield context):
                prob = reached * candidate[1]
                if prob > 0.0 and prob >= least_prob:
                    heapq.heappush(queue, (-prob, arrived, prob, node, candidate))
                    arrived += 1
        if not queue:
            break
        value, order, reached, parent, candidate = heapq.heappop(queue)
        is_open = False
        num_added = tree.added_rows(parent)
        if num_added > rows_left:  # it will never cost less
            continue
        if -value > reached / num_added:  # a sibling was taken since: it costs more than it did, so it waits its turn again
            heapq.heappush(queue, (-reached / num_added, order, reached, parent, candidate))
            continue
        token_id, own_prob, source, context = candidate
        node = tree.add(parent, token_id, own_prob, source)
        rows_left -= num_added
        is_open = tree.depths[node] < budget.max_depth
    return tree.finished()


@dataclass(slots=True)
class _Growing:
    """A tree in the order its nodes were taken."""

    token_ids: list[int]
    layout: TreeLayout
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    sources: list[str] = field(default_factory=lambda: [""])
    probs: list[float] = field(default_factory=lambda: [1.0])
    has_child: list[bool] = field(default_factory=lambda: [False])

    def added_rows(self, parent: int) -> int:
        """Rows that one more child of `parent` adds."""
        if not self.has_child[parent] or self.layout is TreeLayout.MASK:
            return 1
        # with paths the child's whole path, from the root on
        return self.depths[parent] + 2 if self.layout is TreeLayout.PATHS else sys.maxsize

    def add(self, parent: int, token_id: int, prob: float, source: str) -> int:
        """Take a node; returns its number."""
        self.has_child[parent] = True
        self.has_child.append(False)
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.sources.append(source)
        self.probs.append(min(prob, 1.0))
        return len(self.token_ids) - 1

    def finished(self) -> DraftTree | None:
        """Breadth-first, as every tree; None without a draft token."""
        if is_chain(self.parents):
            return DraftTree(self.token_ids, self.parents, self.depths, self.sources, {}, self.probs) if len(self.token_ids) > 1 else None
        return DraftTree.grow(self.token_ids[0], self.token_ids[1:], self.parents[1:], self.sources[1:], probs=self.probs[1:])
