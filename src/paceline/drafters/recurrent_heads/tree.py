"""One request's draft, which grows level by level. Only the most probable nodes of a level get children.

Source: EAGLE-2 (Li et al. 2024, arXiv:2406.16858, sections 4.1 and 4.2): expand the nodes of a level whose paths are most probable, then
propose the most probable of all nodes (`speculation/tree_growth.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.drafters.draft_sampler import DraftSampler, DraftTokens, target_noise_sampling
from paceline.drafters.recurrent_heads.head import DraftFeaturePairs
from paceline.runtimes.base import BoolArray, FloatArray, ForwardOutput, IntArray, RowRange
from paceline.runtimes.logits_summary import LogitsSummary, RowSampling
from paceline.sampling.residual import TokenProbs
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Candidate, grow_tree


@dataclass(slots=True)
class _TreeRows:
    """Input rows of a pass that runs all nodes of a tree that get children. A node attends to its ancestors and itself."""

    features: FloatArray  # [max_rows, E of the head] feature that the head predicted at the parent of each row's node
    mask: BoolArray  # [max_rows, max_rows], True if the node of the row attends to the node of the column
    row_by_node: dict[int, int] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def append(self, nodes: Sequence[int], token_ids: Sequence[int], depth: int, parent_rows: Sequence[int], features: FloatArray) -> None:
        """Append nodes of one depth. `features` were predicted at their parents. `parent_rows` is empty if the parent is the root."""
        first = len(self.token_ids)
        last = first + len(nodes)
        self.features[first:last] = features
        if parent_rows:
            self.mask[first:last] = self.mask[parent_rows]
        rows = range(first, last)
        self.mask[rows, rows] = True
        self.row_by_node.update(zip(nodes, rows, strict=True))
        self.token_ids += token_ids
        self.depths += [depth] * len(nodes)


@dataclass(slots=True)
class GrowingDraft:
    """A request's draft in progress. Nodes are numbered in the order in which they were drafted; node 0 is the root."""

    request: Request
    budget: DraftBudget
    max_depth: int  # maximum number of levels to draft
    width: int  # number of nodes of a level that get children, and number of children of each; 1 = a chain
    block_table: IntArray  # cache blocks of the request, including those for draft tokens
    first_slot: int  # first slot of the cache that draft tokens attend to
    uses_top_tokens: bool = field(init=False)  # the top tokens of a pass are enough to sample from; otherwise whole rows of logits are used
    draws_tokens: bool = field(init=False)  # a pass must also draw a token from each row, with the target's noise
    token_ids: list[int] = field(default_factory=lambda: [-1])  # token of each node; -1 for the root
    parents: list[int] = field(default_factory=lambda: [-1])  # parent of each node; -1 for the root
    token_probs: list[float] = field(default_factory=lambda: [1.0])  # probability of each node's token, given the tokens before it
    path_probs: list[float] = field(default_factory=lambda: [1.0])  # probability that all tokens on a node's path are accepted
    level: int = 0  # number of levels drafted so far
    frontier: Sequence[int] = (0,)  # nodes of the last level that get children next
    draft_probs: dict[int, TokenProbs] = field(default_factory=dict)  # node -> distribution of its children; only for rejection sampling
    _features: FloatArray | None = None  # [1, E of the head] feature predicted at the end of the chain; None for trees
    _rows: _TreeRows | None = None

    def __post_init__(self) -> None:
        is_greedy = self.request.params.is_greedy
        self.uses_top_tokens = self.request.processor.only_applies_temperature and (not self.budget.needs_draft_probs or is_greedy)
        self.draws_tokens = self.uses_top_tokens and not is_greedy

    def path(self, node: int) -> list[int]:
        """Return the tokens of the path from the root to `node`, without the root's."""
        path: list[int] = []
        while node > 0:
            path.append(self.token_ids[node])
            node = self.parents[node]
        return path[::-1]

    def sample(self, sampler: DraftSampler, node: int, output: ForwardOutput, row: int, top_tokens: Sequence[LogitsSummary]) -> DraftTokens:
        """Sample the draft tokens after a node from row `row` of a pass: from `top_tokens` if these are enough, else from logits [Vd]."""
        if self.uses_top_tokens:
            return sampler.sample_from_top_tokens(top_tokens[row], self.width, is_greedy=self.request.params.is_greedy)
        logits = output.logits[row]  # on a GPU, reading any row copies all of them
        return sampler.sample(self.request, self.path(node), logits, self.width, needs_draft_probs=self.budget.needs_draft_probs)

    def add_level(self, drafted: Sequence[DraftTokens], features: FloatArray) -> None:
        """Add a level: the draft tokens after each node of the frontier. The most probable of them become the next frontier.

        Args:
            drafted: the draft tokens after each node of the frontier.
            features: [nodes, E of the head] the feature that the head predicted at each node of the frontier.
        """
        first = len(self.token_ids)
        for node, tokens in zip(self.frontier, drafted, strict=True):
            if tokens.draft_probs is not None and tokens.token_ids:
                self.draft_probs[node] = tokens.draft_probs
            count, path_prob = len(tokens.token_ids), self.path_probs[node]
            self.token_ids += tokens.token_ids
            self.parents += [node] * count
            self.token_probs += tokens.probs
            self.path_probs += [path_prob * self.budget.acceptance_rate(prob) for prob in tokens.probs]
        self.level += 1
        last = len(self.token_ids)
        if first == last or self.level >= self.max_depth or max(self.path_probs[first:]) < self.budget.min_path_prob:
            self.frontier = ()
        elif self.width == 1:
            self._features, self.frontier = features, (first,)
        else:
            self._expand(range(first, last), features)

    def frontier_pairs(self) -> DraftFeaturePairs:
        """Return the inputs of the next pass: the last token of a chain, or all nodes of a tree that have or will get children."""
        base = len(self.request.token_ids)  # first cache slot after the committed tokens
        if self._features is not None:
            rows = RowRange(0, 1, base + self.level - 1, self.block_table, None, self.first_slot)
            return DraftFeaturePairs((self.token_ids[-1],), self._features, (base - 2 + self.level,), rows, range(1))
        tree = self._rows  # nodes of earlier levels run again, because a pass can mask its own rows but not cached rows
        if tree is None:
            raise RuntimeError("a draft has no rows before its first level")
        count = len(tree.token_ids)
        rows = RowRange(0, count, base, self.block_table, tree.mask[:count, :count], self.first_slot)
        positions = [base - 2 + depth for depth in tree.depths]
        return DraftFeaturePairs(tree.token_ids, tree.features[:count], positions, rows, range(count - len(self.frontier), count))

    def to_tree(self, source: str) -> DraftTree | None:
        """Return the tree to propose; None if nothing was drafted."""
        root = self.request.token_ids[-1]
        if len(self.token_ids) == 1:
            return None
        if self.width == 1:
            if self.draft_probs:
                return DraftTree.from_nodes(root, self.token_ids[1:], self.parents[1:], source, self.draft_probs)
            return DraftTree.chain(root, self.token_ids[1:], source, [min(prob, 1.0) for prob in self.token_probs[1:]])
        children: list[list[Candidate[int]]] = [[] for _ in self.token_ids]
        for node, (parent, token, prob) in enumerate(zip(self.parents, self.token_ids, self.token_probs, strict=True)):
            if node:
                children[parent].append((token, prob, node))
        return grow_tree(root, self.budget, 0, children.__getitem__, source)

    def _expand(self, level: Sequence[int], features: FloatArray) -> None:
        """Make the most probable nodes of `level` the frontier. `features` were predicted at the nodes of the old frontier."""
        best = sorted(sorted(level, key=self.path_probs.__getitem__, reverse=True)[: self.width])
        if self._rows is None:
            max_rows = self.width * (self.max_depth - 1)
            self._rows = _TreeRows(np.empty((max_rows, features.shape[1]), np.float32), np.zeros((max_rows, max_rows), np.bool_))
        tree, parents = self._rows, [self.parents[node] for node in best]
        index_of = {node: index for index, node in enumerate(self.frontier)}
        parent_rows = [tree.row_by_node[parent] for parent in parents] if self.level > 1 else []
        inputs = features[[index_of[parent] for parent in parents]]
        tree.append(best, [self.token_ids[node] for node in best], self.level, parent_rows, inputs)
        self.frontier = best


def frontier_sampling(drafts: Sequence[GrowingDraft]) -> RowSampling | None:
    """Return the noise keys and temperatures to draw a token after each frontier node of all drafts; None if none is drawn."""
    return target_noise_sampling([(draft.request, draft.level) if draft.draws_tokens else None for draft in drafts for _ in draft.frontier])


def draft_depth_and_width(budget: DraftBudget, tree_width: int) -> tuple[int, int]:
    """Return the depth and the width of a draft. The width is `tree_width` if the budget has more rows than the longest chain, else 1."""
    return budget.max_tokens, tree_width if budget.max_rows > budget.max_depth + 1 else 1
