"""What a drafter proposes: a tree of draft tokens under the last committed one. A chain is a tree."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from paceline.kv_cache.row_plan import TreeLayout, is_chain, num_rows
from paceline.sampling.residual import TokenProbs


class Proposal(Enum):
    """How draft tokens were chosen, which decides how `acceptance="rejection"` accepts them."""

    DETERMINISTIC = "deterministic"  # not distributed as `draft_probs`: the most probable tokens, or draws that were pruned or merged
    SAMPLED = "sampled"  # a chain: one draw from `draft_probs` at each node
    WITHOUT_REPLACEMENT = "without_replacement"  # several draws at a node, each from what the ones before it left


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens, breadth-first; node 0 is the root, the last committed token.

    Attributes:
        token_ids: [N] token of each node.
        parents: [N] parent of each node, -1 for the root, parents[i] < i.
        depths: [N] tokens between the root and the node, 0 for the root.
        sources: [N] drafter of each node ("" for the root).
        draft_probs: by node, the distribution its children were drawn from, over the target's ids; siblings stand in the order of
            their draws. A node without one has chosen children. To be given only if the number of children was fixed before any was
            drawn, and none was cut for the token it holds.
        probs: [N] how likely its drafter takes each node's token to be, once everything before it is right (1 for the root); None = it
            unknown. They are calibrated by outcomes, so any measure of confidence between 0 and 1 is useful.
    """

    token_ids: Sequence[int]
    parents: Sequence[int]
    depths: Sequence[int]
    sources: Sequence[str]
    draft_probs: Mapping[int, TokenProbs] = field(default_factory=dict, hash=False)
    probs: Sequence[float] | None = field(default=None, compare=False)

    @classmethod
    def root_only(cls, root_token_id: int) -> "DraftTree":
        """The tree of a plain step."""
        return cls((root_token_id,), (-1,), (0,), ("",))

    @classmethod
    def chain(cls, root_token_id: int, draft_token_ids: Sequence[int], source: str, probs: Sequence[float] | None = None) -> "DraftTree":
        """One token a position, with the probability of each where the drafter gives one."""
        count = len(draft_token_ids) + 1
        token_ids, sources = (root_token_id, *draft_token_ids), ("", *[source] * (count - 1))
        return cls(token_ids, range(-1, count - 1), range(count), sources, {}, None if probs is None else (1.0, *probs))

    @classmethod
    def grow(
        cls,
        root_token_id: int,
        draft_token_ids: Sequence[int],
        parents: Sequence[int],
        source: str | Sequence[str],
        draft_probs: Mapping[int, TokenProbs] | None = None,
        probs: Sequence[float] | None = None,
    ) -> "DraftTree":
        """A tree from nodes in any parent-before-child order; siblings with the same token are merged, the first one leads.

        Args:
            draft_token_ids: tokens of nodes 1 … n.
            parents: parent of each of them, 0 = the root.
            source: name of the drafter of all of them, or of each.
            draft_probs: by node in this order, where children were drawn; None = nowhere.
            probs: of nodes 1 … n; None = not known.
        """
        given = [source] * len(draft_token_ids) if isinstance(source, str) else source
        names, chances = [""], [1.0]
        children: list[dict[int, int]] = [{}]  # per node of the result-to-be: token -> node
        node_of = [0]
        for index, (token, parent) in enumerate(zip(draft_token_ids, parents, strict=True), start=1):
            if not 0 <= parent < index:
                raise ValueError(f"node {index} names parent {parent}: parents come before their children")
            siblings = children[node_of[parent]]
            if token not in siblings:
                siblings[token] = len(children)
                children.append({})
                names.append(given[index - 1])
                chances.append(1.0 if probs is None else probs[index - 1])
            node_of.append(siblings[token])
        tokens, tree_parents, depths, order = [root_token_id], [-1], [0], [0]
        for position, node in enumerate(order):  # `order` grows while it is read: breadth-first
            for token, child in children[node].items():
                tokens.append(token)
                tree_parents.append(position)
                depths.append(depths[position] + 1)
                order.append(child)
        drawn: dict[int, TokenProbs] = {}
        if draft_probs:
            if len(order) <= len(draft_token_ids):
                raise ValueError("two siblings of a drawn tree hold the same token: they were not drawn without replacement")
            index_of = {node: index for index, node in enumerate(order)}
            drawn = {index_of[node]: probs for node, probs in draft_probs.items()}  # nothing was merged: node_of is the identity
        ordered = None if probs is None else tuple(chances[node] for node in order)
        return cls(tuple(tokens), tuple(tree_parents), tuple(depths), tuple(names[node] for node in order), drawn, ordered)

    def check(self) -> None:
        """That this is a tree, from whose shape slots, positions and budgets are computed, and that its draws can be draws.

        Raises:
            ValueError: parents, depths and tokens do not make a tree, or a node's children cannot have been drawn from its `draft_probs`.
        """
        count = len(self.token_ids)
        is_chain_of_count = self.parents == range(-1, count - 1) and self.depths == range(count) and len(self.sources) == count
        if is_chain_of_count and not self.draft_probs and (self.probs is None or len(self.probs) == count):
            return
        depths: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent != -1 if node == 0 else not 0 <= parent < node:
                raise ValueError(f"node {node} of the draft tree names parent {parent}: the root has -1, others a node before them")
            depths.append(depths[parent] + 1 if node else 0)
        if not depths or depths != list(self.depths) or not len(self.token_ids) == len(self.sources) == len(depths):
            raise ValueError(f"depths {list(self.depths)} of {len(self.token_ids)} nodes do not follow from parents {list(self.parents)}")
        if self.probs is not None and (len(self.probs) != len(depths) or not all(0.0 <= prob <= 1.0 for prob in self.probs)):
            raise ValueError(f"probs {list(self.probs)} of {len(depths)} nodes: one for each, from 0 to 1")
        for node, probs in self.draft_probs.items():
            drawn = self.children(node)
            if not drawn or not probs.is_normalised() or not all(probs.prob(self.token_ids[child]) > 0 for child in drawn):
                raise ValueError(
                    f"the children {[self.token_ids[child] for child in drawn]} of node {node} cannot come from its draft_probs"
                )

    @property
    def proposal(self) -> Proposal:
        """How the draft tokens were chosen."""
        if not self.draft_probs:
            return Proposal.DETERMINISTIC
        return Proposal.SAMPLED if is_chain(self.parents) else Proposal.WITHOUT_REPLACEMENT

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens, the root excluded."""
        return len(self.token_ids) - 1

    @property
    def tree_depth(self) -> int:
        """Tokens on the longest path, the root excluded."""
        return self.depths[-1]

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` that holds `token_id`."""
        return next((child for child in self.children(node) if self.token_ids[child] == token_id), None)

    def children(self, node: int) -> Sequence[int]:
        """The children of `node`, in order."""
        count = len(self.parents)
        if isinstance(self.parents, range):  # a chain
            return range(node + 1, min(node + 2, count))
        return [child for child in range(node + 1, count) if self.parents[child] == node]

    def trim(self, *, vocab_size: int, max_depth: int, row_budget: int, layout: TreeLayout) -> "DraftTree":
        """The tree without ids that do not exist, nodes deeper than `max_depth`, and what exceeds `row_budget` rows in `layout`.

        Drafts stay drawn: depths and rows depend on the shape alone, and what is left of a node's children are its first draws.
        Where `draft_probs` reach ids that do not exist, their drafts count as chosen, whatever they hold: to decide that by the
        tokens drawn (chosen only where one of the ids does not exist) would keep the existing ones too often.
        """
        if not self.draft_probs and self._is_within(vocab_size, max_depth, row_budget, layout):
            return self
        new_index: dict[int, int] = {-1: -1}
        kept: list[int] = []
        parents: list[int] = []
        for node, (token, parent, depth) in enumerate(zip(self.token_ids, self.parents, self.depths, strict=True)):
            if parent not in new_index or depth > max_depth or (node and not 0 <= token < vocab_size):
                continue
            if kept and num_rows([*parents, new_index[parent]], layout) > row_budget:
                continue
            if kept and layout is TreeLayout.CHAIN and new_index[parent] != len(kept) - 1:
                continue
            new_index[node] = len(kept)
            parents.append(new_index[parent])
            kept.append(node)
        drawn = {node: probs for node, probs in self.draft_probs.items() if probs.is_within(vocab_size)}
        if len(kept) == len(self.token_ids) and len(drawn) == len(self.draft_probs):
            return self
        return self._part(kept, parents, drawn)

    def _is_within(self, vocab_size: int, max_depth: int, row_budget: int, layout: TreeLayout) -> bool:
        """Whether `trim` would leave every node."""
        if max(self.depths) > max_depth or not all(0 <= token < vocab_size for token in self.token_ids[1:]):  # NaN is no id either
            return False
        return num_rows(self.parents, layout) <= row_budget and (layout is not TreeLayout.CHAIN or is_chain(self.parents))

    def prune(self, fits: Callable[[Sequence[int]], bool]) -> "DraftTree":
        """What there is room for: of the first path as much as can be had, then every other node that still fits.

        The first path is that of first children. Where tokens were drawn, nodes are taken level by level in its place: what is kept must
        not depend on what was drawn after it, or the drafts kept would not follow their `draft_probs` any more (see `trim`).

        Args:
            fits: whether there is room for the tree of these parents; if so there is for all its parts. The root always fits.
        """
        first = [] if self.draft_probs else self.first_path()
        kept = [0]
        for node in dict.fromkeys((*first, *range(1, len(self.parents)))):
            with_node = sorted((*kept, node))
            if self.parents[node] in kept and fits(self._parents_among(with_node)):
                kept = with_node
        return self.part(kept)

    def first_path(self) -> list[int]:
        """The nodes of the path of first children, from the root's child down."""
        path = [0]
        for node, parent in enumerate(self.parents):
            if parent == path[-1]:
                path.append(node)
        return path[1:]

    def _parents_among(self, kept: Sequence[int]) -> list[int]:
        """Parents of nodes by their index in `kept`."""
        index = {node: position for position, node in enumerate(kept)}
        return [index.get(self.parents[node], -1) for node in kept]

    def _part(self, kept: Sequence[int], parents: Sequence[int], drawn: Mapping[int, TokenProbs]) -> "DraftTree":
        """The tree of the nodes `kept`, whose `parents` are indices among them, with what is left of the distributions `drawn`."""
        new_index = {node: index for index, node in enumerate(kept)}
        inner = set(parents)
        left = {new_index[node]: probs for node, probs in drawn.items() if new_index.get(node) in inner}
        token_ids, depths = (tuple(values[node] for node in kept) for values in (self.token_ids, self.depths))
        chances = None if self.probs is None else tuple(self.probs[node] for node in kept)
        return DraftTree(token_ids, tuple(parents), depths, tuple(self.sources[node] for node in kept), left, chances)

    def part(self, kept: Sequence[int]) -> "DraftTree":
        """The tree of these nodes, in ascending order, each with its parent."""
        return self if len(kept) == len(self.parents) else self._part(kept, self._parents_among(kept), self.draft_probs)
