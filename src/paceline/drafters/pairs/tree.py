"""One request's draft while it grows: levels of guesses, of which the likeliest are expanded, and the best are proposed in the end.

Source: EAGLE-2 (Li et al. 2024, arXiv:2406.16858, sections 4.1 and 4.2): expand the best of a level by the probability of their whole path,
then choose among everything that was guessed. Deviation: the choice counts rows of the target pass (`speculation/tree_growth.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.drafters.pairs.guesses import Guessed
from paceline.drafters.pairs.head import DraftedRows
from paceline.kv_cache.row_plan import TreeLayout
from paceline.runtimes.base import BoolArray, FloatArray, IntArray, RowRange
from paceline.runtimes.ranking import DRAW, Draws
from paceline.sampling.noise import Purpose, noise_key
from paceline.sampling.residual import TokenProbs
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Candidate, grow_tree


@dataclass(slots=True)
class _TreeRows:
    """The pairs of a tree that runs as a whole: every node sees its own ancestors.

    Attributes:
        features: [most, Hd] what the pairs take.
        mask: [most, most], True where the row's node may attend to the column's.
        row_of: node -> row.
    """

    features: FloatArray
    mask: BoolArray
    row_of: dict[int, int] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, most: int, size: int) -> "_TreeRows":
        return cls(np.empty((most, size), np.float32), np.zeros((most, most), np.bool_))

    def add(self, nodes: Sequence[int], token_ids: Sequence[int], depth: int, above: Sequence[int], features: FloatArray) -> None:
        """Nodes of one depth.

        Args:
            above: the row of each one's parent; none where the parent is the root.
            features: [nodes, Hd].
        """
        first = len(self.token_ids)
        last = first + len(nodes)
        self.features[first:last] = features
        if above:
            self.mask[first:last] = self.mask[above]
        rows = range(first, last)
        self.mask[rows, rows] = True
        self.row_of.update(zip(nodes, rows, strict=True))
        self.token_ids += token_ids
        self.depths += [depth] * len(nodes)


@dataclass(slots=True)
class GrowingDraft:
    """Nodes in the order they were guessed; node 0 is the root.

    Attributes:
        depth: levels to guess.
        width: nodes of a level that are expanded, and guesses behind each; 1 = a chain.
        block_table: where the drafted rows stand, behind the true pairs.
        first_slot: the first slot they attend to.
        reads_ranks: whether the pass's own ranking of its rows is enough.
        is_drawn: whether that includes a draw.
    """

    request: Request
    budget: DraftBudget
    depth: int
    width: int
    block_table: IntArray
    first_slot: int
    reads_ranks: bool = field(init=False)
    is_drawn: bool = field(init=False)
    token_ids: list[int] = field(default_factory=lambda: [-1])
    parents: list[int] = field(default_factory=lambda: [-1])
    probs: list[float] = field(default_factory=lambda: [1.0])  # of the step from the parent
    reached: list[float] = field(default_factory=lambda: [1.0])  # of the whole path
    level: int = 0  # depth of the frontier
    frontier: Sequence[int] = (0,)  # nodes whose pairs run next
    draft_probs: dict[int, TokenProbs] = field(default_factory=dict)
    _features: FloatArray | None = None  # [1, Hd] what the next pair of a chain takes
    _rows: _TreeRows | None = None

    def __post_init__(self) -> None:
        is_greedy = self.request.params.is_greedy
        self.reads_ranks = self.request.processor.only_scales and (not self.budget.needs_draft_probs or is_greedy)
        self.is_drawn = self.reads_ranks and not is_greedy

    def path(self, node: int) -> list[int]:
        """Tokens from the root's child to `node`."""
        path: list[int] = []
        while node > 0:
            path.append(self.token_ids[node])
            node = self.parents[node]
        return path[::-1]

    def take(self, guesses: Sequence[Guessed], features: FloatArray) -> None:
        """The guesses behind each node of the frontier, and the features [nodes, Hd] their own pairs take; the best are next."""
        first = len(self.token_ids)
        for node, guessed in zip(self.frontier, guesses, strict=True):
            if guessed.draft_probs is not None and guessed.token_ids:
                self.draft_probs[node] = guessed.draft_probs
            count, reached = len(guessed.token_ids), self.reached[node]
            self.token_ids += guessed.token_ids
            self.parents += [node] * count
            self.probs += guessed.probs
            self.reached += [reached * self.budget.rate(prob) for prob in guessed.probs]
        self.level += 1
        last = len(self.token_ids)
        if first == last or self.level >= self.depth or max(self.reached[first:]) < self.budget.min_reach:
            self.frontier = ()
        elif self.width == 1:
            self._features, self.frontier = features, (first,)
        else:
            self._expand(range(first, last), features)

    def next_rows(self) -> DraftedRows:
        """The pairs of the frontier. A chain goes on behind its rows; a tree runs as a whole, each node seeing its own ancestors."""
        base = len(self.request.token_ids)  # slots of the true pairs, the root's included
        if self._features is not None:
            rows = RowRange(0, 1, base + self.level - 1, self.block_table, None, self.first_slot)
            return DraftedRows((self.token_ids[-1],), self._features, (base - 2 + self.level,), rows, range(1))
        tree = self._rows
        if tree is None:
            raise RuntimeError("a draft has no rows before its first guesses")
        count = len(tree.token_ids)
        rows = RowRange(0, count, base, self.block_table, tree.mask[:count, :count], self.first_slot)
        positions = [base - 2 + depth for depth in tree.depths]
        return DraftedRows(tree.token_ids, tree.features[:count], positions, rows, range(count - len(self.frontier), count))

    def finished(self, source: str) -> DraftTree | None:
        """What is proposed."""
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
        """The best of a level become the frontier.

        Args:
            features: [nodes, Hd] those of the frontier so far.
        """
        best = sorted(sorted(level, key=self.reached.__getitem__, reverse=True)[: self.width])
        if self._rows is None:
            self._rows = _TreeRows.empty(self.width * (self.depth - 1), features.shape[1])
        tree, parents = self._rows, [self.parents[node] for node in best]
        place = {node: index for index, node in enumerate(self.frontier)}
        above = [tree.row_of[parent] for parent in parents] if self.level > 1 else []
        tree.add(best, [self.token_ids[node] for node in best], self.level, above, features[[place[parent] for parent in parents]])
        self.frontier = best


def draws_of(drafts: Sequence[GrowingDraft]) -> Draws | None:
    """How the next tokens are drawn, by node of all frontiers: those of one level share their noise."""
    if not any(draft.is_drawn for draft in drafts):
        return None
    draws = np.zeros(sum([len(draft.frontier) for draft in drafts]), DRAW)
    first = 0
    for draft in drafts:
        last = first + len(draft.frontier)
        if draft.is_drawn:
            request = draft.request
            key = noise_key(request.seed, request.sample_index, len(request.token_ids) + draft.level, Purpose.TOKEN)
            draws[first:last] = (key, request.params.temperature, 0)
        first = last
    return draws


def shape_of(budget: DraftBudget, tree_width: int) -> tuple[int, int]:
    """Depth and width of a draft: a tree only where there are rows for branches beside the longest chain."""
    depth = budget.max_tokens
    has_room = budget.row_budget > budget.max_depth + 1 and budget.layout is not TreeLayout.CHAIN
    return depth, tree_width if has_room else 1
