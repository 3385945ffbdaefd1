"""One request's draft while it grows: levels of guesses, of which the likeliest are expanded, and the best are proposed in the end.

Source: EAGLE-2 (Li et al. 2024, arXiv:2406.16858, sections 4.1 and 4.2): expand the best of a level by the probability of their whole path,
then choose among everything that was guessed. Deviation: the choice counts rows of the target pass (`speculation/tree_growth.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.drafters.pairs.guesses import Guessed
from paceline.drafters.pairs.head import DraftedRows
from paceline.runtimes.base import BoolArray, FloatArray, IntArray, RowRange
from paceline.sampling.residual import TokenProbs
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Guess, grow_tree


@dataclass(slots=True)
class GrowingDraft:
    """Nodes in the order they were guessed; node 0 is the root.

    Attributes:
        depth: levels to guess.
        width: nodes of a level that are expanded, and guesses behind each; 1 = a chain.
        block_table: where the drafted rows stand, behind the true pairs.
        first_slot: what they see.
    """

    request: Request
    budget: DraftBudget
    depth: int
    width: int
    block_table: IntArray
    first_slot: int
    token_ids: list[int] = field(default_factory=lambda: [-1])
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    probs: list[float] = field(default_factory=lambda: [1.0])  # of the step from the parent
    reached: list[float] = field(default_factory=lambda: [1.0])  # of the whole path
    features: dict[int, FloatArray] = field(default_factory=dict)  # what the pairs of a node's children take
    expanded: list[int] = field(default_factory=list)  # nodes whose pairs were run, parents before their children
    frontier: list[int] = field(default_factory=lambda: [0])  # those to be run next
    draft_probs: dict[int, TokenProbs] = field(default_factory=dict)

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
        for node, guessed, feature in zip(self.frontier, guesses, features, strict=True):
            self.features[node] = feature
            if guessed.law is not None and guessed.token_ids:
                self.draft_probs[node] = guessed.law
            for token, prob in zip(guessed.token_ids, guessed.probs, strict=True):
                self.token_ids.append(token)
                self.parents.append(node)
                self.depths.append(self.depths[node] + 1)
                self.probs.append(prob)
                self.reached.append(self.reached[node] * prob)
        self.expanded += [node for node in self.frontier if node > 0]
        level = range(first, len(self.token_ids))
        if not level or self.depths[-1] >= self.depth:
            self.frontier = []
        else:
            self.frontier = sorted(sorted(level, key=lambda node: -self.reached[node])[: self.width])

    def next_rows(self) -> DraftedRows:
        """The pairs of the frontier. A chain goes on behind its rows; a tree runs as a whole, each node seeing its own ancestors."""
        base = len(self.request.token_ids)  # slots of the true pairs, the root's included
        if self.width == 1:
            nodes = self.frontier
            rows = RowRange(0, 1, base + len(self.expanded), self.block_table, None, self.first_slot)
        else:
            nodes = [*self.expanded, *self.frontier]
            rows = RowRange(0, len(nodes), base, self.block_table, self._mask(nodes), self.first_slot)
        return DraftedRows(
            [self.token_ids[node] for node in nodes],
            np.array([self.features[self.parents[node]] for node in nodes]),
            [base - 2 + self.depths[node] for node in nodes],
            rows,
            range(len(nodes) - len(self.frontier), len(nodes)),
        )

    def _mask(self, nodes: Sequence[int]) -> BoolArray:
        """[nodes, nodes], True where the row's node may attend to the column's: its ancestors among them and itself."""
        mask = np.eye(len(nodes), dtype=np.bool_)
        row_of = {node: row for row, node in enumerate(nodes)}
        for row, node in enumerate(nodes):
            above = row_of.get(self.parents[node])  # the root is no row of these
            if above is not None:
                mask[row] |= mask[above]
        return mask

    def finished(self, source: str) -> DraftTree | None:
        """What is proposed."""
        root = self.request.token_ids[-1]
        if len(self.token_ids) == 1:
            return None
        if self.width == 1:
            if self.draft_probs:
                return DraftTree.grow(root, self.token_ids[1:], self.parents[1:], source, self.draft_probs)
            return DraftTree.chain(root, self.token_ids[1:], source)
        children: list[list[Guess[int]]] = [[] for _ in self.token_ids]
        for node in range(1, len(self.token_ids)):
            children[self.parents[node]].append((self.token_ids[node], self.probs[node], source, node))
        return grow_tree(root, self.budget, 0, lambda node: children[node])
