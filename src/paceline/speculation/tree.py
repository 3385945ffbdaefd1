"""Draft trees: draft tokens after the last committed token. A chain is a tree with one node at each depth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from paceline.kv_cache.row_plan import is_chain
from paceline.sampling.residual import TokenProbs


class DraftSampling(Enum):
    """How draft tokens were chosen, which decides how `acceptance="rejection"` accepts them."""

    DETERMINISTIC = "deterministic"  # draft tokens are not sampled from `draft_probs`, such as the most probable tokens
    SAMPLED = "sampled"  # the draft is a chain: one sample from `draft_probs` at each node
    WITHOUT_REPLACEMENT = "without_replacement"  # several samples at a node, each from the distribution without the earlier ones


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens in breadth-first order; node 0 is the root, the last committed token.

    Attributes:
        token_ids: [N] token of each node.
        parents: [N] parent of each node, -1 for the root, parents[i] < i.
        depths: [N] distance of each node from the root, 0 for the root.
        sources: [N] name of the drafter of each node ("" for the root).
        draft_probs: by node, the distribution over the target's ids from which its children were sampled, in the order of the children.
            Nodes whose children were not sampled have none. The number of children, and which of them were pruned, must not depend on the
            sampled tokens.
        confidences: [N] the drafter's confidence in each node's token, given that all tokens before it are accepted (1 for the root);
            None = unknown. Any value between 0 and 1 will do, because the policy calibrates it.
    """

    token_ids: Sequence[int]
    parents: Sequence[int]
    depths: Sequence[int]
    sources: Sequence[str]
    draft_probs: Mapping[int, TokenProbs] = field(default_factory=dict, hash=False)
    confidences: Sequence[float] | None = field(default=None, compare=False)

    @classmethod
    def root_only(cls, root_token_id: int) -> "DraftTree":
        """Return a tree without draft tokens."""
        return cls((root_token_id,), (-1,), (0,), ("",))

    @classmethod
    def chain(
        cls, root_token_id: int, draft_token_ids: Sequence[int], source: str, confidences: Sequence[float] | None = None
    ) -> "DraftTree":
        """Return a tree with one token at each depth."""
        count = len(draft_token_ids) + 1
        token_ids, sources = (root_token_id, *draft_token_ids), ("", *[source] * (count - 1))
        return cls(token_ids, range(-1, count - 1), range(count), sources, {}, None if confidences is None else (1.0, *confidences))

    @classmethod
    def from_nodes(
        cls,
        root_token_id: int,
        draft_token_ids: Sequence[int],
        parents: Sequence[int],
        source: str | Sequence[str],
        draft_probs: Mapping[int, TokenProbs] | None = None,
        confidences: Sequence[float] | None = None,
    ) -> "DraftTree":
        """Return a tree of nodes that are given in any order with parents before children. Siblings with the same token are merged.

        Args:
            draft_token_ids: tokens of the given nodes 1 … n.
            parents: parent of each given node, 0 = the root.
            source: name of the drafter of all given nodes, or of each.
            draft_probs: for each given node, the distribution from which its children were sampled; None = no children were sampled.
            confidences: confidence in given nodes 1 … n; None = unknown.
        """
        merged_node = [0]  # for each input node: its first sibling with the same token, into which it is merged
        children: list[dict[int, int]] = [{}]  # for each input node: its children by token id
        for index, (token, parent) in enumerate(zip(draft_token_ids, parents, strict=True), start=1):
            if not 0 <= parent < index:
                raise ValueError(f"node {index} has parent {parent}: parents must come before their children")
            merged_node.append(children[merged_node[parent]].setdefault(token, index))
            children.append({})
        order, depths, tree_parents = [0], [0], [-1]  # for each node of the result: its index among the given nodes, its depth, its parent
        for position, node in enumerate(order):  # breadth-first: `order` grows while it is read
            for child in children[node].values():
                order.append(child)
                depths.append(depths[position] + 1)
                tree_parents.append(position)
        if draft_probs and len(order) <= len(draft_token_ids):
            raise ValueError("two siblings of a sampled tree have the same token: they were not sampled without replacement")
        position_of = {node: position for position, node in enumerate(order)}
        names = [source] * len(draft_token_ids) if isinstance(source, str) else source
        return cls(
            (root_token_id, *(draft_token_ids[node - 1] for node in order[1:])),
            tuple(tree_parents),
            tuple(depths),
            ("", *(names[node - 1] for node in order[1:])),
            {position_of[node]: token_probs for node, token_probs in (draft_probs or {}).items()},
            None if confidences is None else (1.0, *(confidences[node - 1] for node in order[1:])),
        )

    def check(self) -> None:
        """Check that the arrays describe a tree and match in length, that `draft_probs` are distributions (`TokenProbs.is_valid`), and that
        sampled tokens have a probability above 0 in them.

        Raises:
            ValueError: one of these conditions does not hold.
        """
        count = len(self.token_ids)
        if self.parents != range(-1, count - 1) or self.depths != range(count):  # a chain is valid by construction
            depths: list[int] = []
            for node, parent in enumerate(self.parents):
                if parent != -1 if node == 0 else not 0 <= parent < node:
                    raise ValueError(f"node {node} of the draft tree has parent {parent}: use -1 for the root, else an earlier node")
                depths.append(depths[parent] + 1 if node else 0)
            if not depths or depths != list(self.depths) or len(depths) != count:
                raise ValueError(f"depths {list(self.depths)} of {count} nodes do not follow from parents {list(self.parents)}")
            if depths != sorted(depths):
                raise ValueError(f"nodes of depths {depths} are not in breadth-first order: build the tree with DraftTree.from_nodes")
        if len(self.sources) != count:
            raise ValueError(f"{len(self.sources)} sources of {count} nodes: give one for each")
        if self.confidences is not None and (
            len(self.confidences) != count or not all(0.0 <= confidence <= 1.0 for confidence in self.confidences)
        ):
            raise ValueError(f"confidences {list(self.confidences)} of {count} nodes: give one for each, from 0 to 1")
        for node, probs in self.draft_probs.items():
            tokens = [self.token_ids[child] for child in self.children(node)]
            if not tokens or not probs.is_valid() or not all(probs.prob(token) > 0 for token in tokens):
                rule = "give 1-D probs that sum to 1, above 0 for each child, and ascending token_ids"
                raise ValueError(f"the children {tokens} of node {node} cannot come from its draft_probs: {rule}")

    @property
    def draft_sampling(self) -> DraftSampling:
        """How the draft tokens were chosen."""
        if not self.draft_probs:
            return DraftSampling.DETERMINISTIC
        return DraftSampling.SAMPLED if is_chain(self.parents) else DraftSampling.WITHOUT_REPLACEMENT

    @property
    def num_draft_tokens(self) -> int:
        """Number of draft tokens, the root excluded."""
        return len(self.token_ids) - 1

    @property
    def tree_depth(self) -> int:
        """Number of tokens on the longest path, the root excluded."""
        return self.depths[-1]

    def child(self, node: int, token_id: int) -> int | None:
        return next((child for child in self.children(node) if self.token_ids[child] == token_id), None)

    def children(self, node: int) -> Sequence[int]:
        count = len(self.parents)
        if isinstance(self.parents, range):  # a chain
            return range(node + 1, min(node + 2, count))
        return [child for child in range(node + 1, count) if self.parents[child] == node]

    def first_child_path(self) -> list[int]:
        """Return the nodes of the path of first children, from depth 1 down."""
        path = [0]
        for node, parent in enumerate(self.parents):
            if parent == path[-1]:
                path.append(node)
        return path[1:]

    def subtree(self, nodes: Sequence[int]) -> "DraftTree":
        """Return the tree of these nodes, which must be ascending and include their parents. `draft_probs` of new leaves are dropped."""
        if len(nodes) == len(self.parents):
            return self
        position_of = {node: position for position, node in enumerate(nodes)}
        parents = tuple(position_of.get(self.parents[node], -1) for node in nodes)
        nodes_with_children = set(parents)
        return DraftTree(
            tuple(self.token_ids[node] for node in nodes),
            parents,
            tuple(self.depths[node] for node in nodes),
            tuple(self.sources[node] for node in nodes),
            {position_of[node]: probs for node, probs in self.draft_probs.items() if position_of.get(node) in nodes_with_children},
            None if self.confidences is None else tuple(self.confidences[node] for node in nodes),
        )

    def prune(self, fits: Callable[[Sequence[int]], bool]) -> "DraftTree":
        """Return the part of the tree that fits: as much as possible of the path of first children, then each other node that still fits.

        Nodes of a sampled tree are taken in breadth-first order only. If the kept nodes depended on tokens sampled later, the drafts would
        no longer follow their `draft_probs`.

        Args:
            fits: whether a tree with these parents fits. Each part of a tree that fits must fit, too, and so must the root alone.
        """
        if fits(self.parents):
            return self
        preferred = [] if self.draft_probs else self.first_child_path()
        kept_nodes = [0]
        for node in dict.fromkeys((*preferred, *range(1, len(self.parents)))):
            nodes = sorted((*kept_nodes, node))
            position_of = {kept_node: position for position, kept_node in enumerate(nodes)}
            if self.parents[node] in position_of and fits([position_of.get(self.parents[kept_node], -1) for kept_node in nodes]):
                kept_nodes = nodes
        return self.subtree(kept_nodes)

    def trim(self, *, vocab_size: int, max_depth: int, max_rows: int) -> "DraftTree":
        """Return the tree without invalid ids and nodes deeper than `max_depth`, pruned to `max_rows` nodes.

        A distribution in `draft_probs` with a probability for an invalid id is dropped, so that the node's children count as not sampled.
        If only trees with a sampled invalid id lost the distribution, valid ids would be accepted too often.
        """
        kept_nodes = dict[int, None]()  # used as a set that keeps the order of insertion
        for node, (token, parent, depth) in enumerate(zip(self.token_ids, self.parents, self.depths, strict=True)):
            if node == 0 or (parent in kept_nodes and depth <= max_depth and 0 <= token < vocab_size):
                kept_nodes[node] = None
        tree = self.subtree(list(kept_nodes))
        draft_probs = {node: probs for node, probs in tree.draft_probs.items() if probs.is_within(vocab_size)}
        if len(draft_probs) < len(tree.draft_probs):
            tree = replace(tree, draft_probs=draft_probs)
        return tree.prune(lambda parents: len(parents) <= max_rows)
