"""Growth of one request's draft, level by level: the best nodes of a level are expanded, and the best of all nodes are proposed.

Source: EAGLE-2 (Li et al. 2024, arXiv:2406.16858, sections 4.1 and 4.2): rank a level by the probability of the whole path, then choose
among all nodes. Deviation: the choice counts rows of the target pass (`speculation/tree_growth.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.drafters.draft_sampler import DraftTokens, token_draws
from paceline.drafters.recurrent_heads.head import DraftPairs
from paceline.kv_cache.row_plan import TreeLayout
from paceline.runtimes.base import BoolArray, FloatArray, IntArray, RowRange
from paceline.runtimes.logits_summary import RowSampling
from paceline.sampling.residual import TokenProbs
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Candidate, grow_tree


@dataclass(slots=True)
class _TreeRows:
    """The expanded nodes of a tree, which run together: each node attends to its own ancestors.

    Attributes:
        features: [max_rows, Hd] input features of the pairs.
        mask: [max_rows, max_rows], True if the row's node may attend to the column's.
        row_of: node -> row.
    """

    features: FloatArray
    mask: BoolArray
    row_of: dict[int, int] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, max_rows: int, size: int) -> "_TreeRows":
        return cls(np.empty((max_rows, size), np.float32), np.zeros((max_rows, max_rows), np.bool_))

    def append(self, nodes: Sequence[int], token_ids: Sequence[int], depth: int, parent_rows: Sequence[int], features: FloatArray) -> None:
        """Append nodes of one depth.

        Args:
            parent_rows: the row of each node's parent; empty if the parent is the root.
            features: [nodes, Hd].
        """
        first = len(self.token_ids)
        last = first + len(nodes)
        self.features[first:last] = features
        if parent_rows:
            self.mask[first:last] = self.mask[parent_rows]
        rows = range(first, last)
        self.mask[rows, rows] = True
        self.row_of.update(zip(nodes, rows, strict=True))
        self.token_ids += token_ids
        self.depths += [depth] * len(nodes)


@dataclass(slots=True)
class GrowingDraft:
    """A draft in progress: nodes in the order in which they were drafted; node 0 is the root.

    Attributes:
        depth: levels to draft.
        width: nodes of a level that are expanded, and draft tokens after each; 1 = a chain.
        block_table: blocks of the drafted rows, which follow the true pairs.
        first_slot: the first slot they attend to.
        uses_ranking: whether the ranking made by the pass suffices; otherwise whole rows of logits are sampled.
        is_drawn: whether that ranking includes a draw.
    """

    request: Request
    budget: DraftBudget
    depth: int
    width: int
    block_table: IntArray
    first_slot: int
    uses_ranking: bool = field(init=False)
    is_drawn: bool = field(init=False)
    token_ids: list[int] = field(default_factory=lambda: [-1])
    parents: list[int] = field(default_factory=lambda: [-1])
    probs: list[float] = field(default_factory=lambda: [1.0])  # probability of each node's token given its parent
    path_probs: list[float] = field(default_factory=lambda: [1.0])
    level: int = 0  # depth of the frontier
    frontier: Sequence[int] = (0,)  # nodes whose children are drafted next
    draft_probs: dict[int, TokenProbs] = field(default_factory=dict)
    _features: FloatArray | None = None  # [1, Hd] input feature of the next pair, if the draft is a chain
    _rows: _TreeRows | None = None

    def __post_init__(self) -> None:
        is_greedy = self.request.params.is_greedy
        self.uses_ranking = self.request.processor.only_scales and (not self.budget.needs_draft_probs or is_greedy)
        self.is_drawn = self.uses_ranking and not is_greedy

    def path(self, node: int) -> list[int]:
        """Return the tokens from the root's child to `node`."""
        path: list[int] = []
        while node > 0:
            path.append(self.token_ids[node])
            node = self.parents[node]
        return path[::-1]

    def add_level(self, drafted: Sequence[DraftTokens], features: FloatArray) -> None:
        """Add the draft tokens after each node of the frontier; the best of them become the next frontier.

        Args:
            features: [nodes, Hd] input features of the new nodes' pairs, by node of the frontier.
        """
        first = len(self.token_ids)
        for node, tokens in zip(self.frontier, drafted, strict=True):
            if tokens.draft_probs is not None and tokens.token_ids:
                self.draft_probs[node] = tokens.draft_probs
            count, path_prob = len(tokens.token_ids), self.path_probs[node]
            self.token_ids += tokens.token_ids
            self.parents += [node] * count
            self.probs += tokens.probs
            self.path_probs += [path_prob * self.budget.acceptance_rate(prob) for prob in tokens.probs]
        self.level += 1
        last = len(self.token_ids)
        if first == last or self.level >= self.depth or max(self.path_probs[first:]) < self.budget.min_path_prob:
            self.frontier = ()
        elif self.width == 1:
            self._features, self.frontier = features, (first,)
        else:
            self._expand(range(first, last), features)

    def frontier_rows(self) -> DraftPairs:
        """Return the rows of the next pass. For a chain it is one row; for a tree all expanded nodes run again."""
        base = len(self.request.token_ids)  # number of slots of true pairs, the root's included
        if self._features is not None:
            rows = RowRange(0, 1, base + self.level - 1, self.block_table, None, self.first_slot)
            return DraftPairs((self.token_ids[-1],), self._features, (base - 2 + self.level,), rows, range(1))
        tree = self._rows
        if tree is None:
            raise RuntimeError("a draft has no rows before its first level")
        count = len(tree.token_ids)
        rows = RowRange(0, count, base, self.block_table, tree.mask[:count, :count], self.first_slot)
        positions = [base - 2 + depth for depth in tree.depths]
        return DraftPairs(tree.token_ids, tree.features[:count], positions, rows, range(count - len(self.frontier), count))

    def to_tree(self, source: str) -> DraftTree | None:
        """Return the tree to propose; None without draft tokens."""
        root = self.request.token_ids[-1]
        if len(self.token_ids) == 1:
            return None
        if self.width == 1:
            if self.draft_probs:
                return DraftTree.grow(root, self.token_ids[1:], self.parents[1:], source, self.draft_probs)
            return DraftTree.chain(root, self.token_ids[1:], source, [min(prob, 1.0) for prob in self.probs[1:]])
        children: list[list[Candidate[int]]] = [[] for _ in self.token_ids]
        for node, (parent, token, prob) in enumerate(zip(self.parents, self.token_ids, self.probs, strict=True)):
            if node:
                children[parent].append((token, prob, source, node))
        return grow_tree(root, self.budget, 0, children.__getitem__)

    def _expand(self, level: Sequence[int], features: FloatArray) -> None:
        """Make the best nodes of a level the frontier.

        Args:
            features: [nodes, Hd] by node of the frontier so far.
        """
        best = sorted(sorted(level, key=self.path_probs.__getitem__, reverse=True)[: self.width])
        if self._rows is None:
            self._rows = _TreeRows.empty(self.width * (self.depth - 1), features.shape[1])
        tree, parents = self._rows, [self.parents[node] for node in best]
        index_of = {node: index for index, node in enumerate(self.frontier)}
        parent_rows = [tree.row_of[parent] for parent in parents] if self.level > 1 else []
        inputs = features[[index_of[parent] for parent in parents]]
        tree.append(best, [self.token_ids[node] for node in best], self.level, parent_rows, inputs)
        self.frontier = best


def frontier_draws(drafts: Sequence[GrowingDraft]) -> RowSampling | None:
    """Return how the next token after each node of all frontiers is drawn; None if none is. Nodes of one level share their noise."""
    return token_draws([(draft.request, draft.level) if draft.is_drawn else None for draft in drafts for _ in draft.frontier])


def draft_depth_and_width(budget: DraftBudget, tree_width: int) -> tuple[int, int]:
    """Return depth and width of a draft: a tree only if the budget has rows for branches next to the longest chain."""
    depth = budget.max_tokens
    has_room = budget.row_budget > budget.max_depth + 1 and budget.layout is not TreeLayout.CHAIN
    return depth, tree_width if has_room else 1
