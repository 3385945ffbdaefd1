"""What a drafter proposes: a tree of guessed tokens under the last committed one. A chain is a tree."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.kv_cache.row_plan import TreeLayout, num_rows


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Guessed tokens, breadth-first; node 0 is the root, the last committed token.

    Attributes:
        token_ids: [N] token of each node.
        parents: [N] parent of each node, -1 for the root, parents[i] < i.
        depths: [N] tokens between the root and the node, 0 for the root.
        sources: [N] name of the drafter that guessed each node ("" for the root).
    """

    token_ids: Sequence[int]
    parents: Sequence[int]
    depths: Sequence[int]
    sources: Sequence[str]

    @classmethod
    def root_only(cls, root_token_id: int) -> "DraftTree":
        """The tree of a plain step."""
        return cls((root_token_id,), (-1,), (0,), ("",))

    @classmethod
    def chain(cls, root_token_id: int, draft_token_ids: Sequence[int], source: str) -> "DraftTree":
        """One guess a position."""
        count = len(draft_token_ids) + 1
        return cls((root_token_id, *draft_token_ids), range(-1, count - 1), range(count), ("", *[source] * (count - 1)))

    @classmethod
    def grow(cls, root_token_id: int, draft_token_ids: Sequence[int], parents: Sequence[int], source: str | Sequence[str]) -> "DraftTree":
        """A tree from nodes in any parent-before-child order; siblings with the same token are merged, the first one leads.

        Args:
            draft_token_ids: tokens of nodes 1 … n.
            parents: parent of each of them, 0 = the root.
            source: who guessed them, all or each.
        """
        given = [source] * len(draft_token_ids) if isinstance(source, str) else source
        names = [""]
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
            node_of.append(siblings[token])
        tokens, tree_parents, depths, order = [root_token_id], [-1], [0], [0]
        for position, node in enumerate(order):  # `order` grows while it is read: breadth-first
            for token, child in children[node].items():
                tokens.append(token)
                tree_parents.append(position)
                depths.append(depths[position] + 1)
                order.append(child)
        return cls(tuple(tokens), tuple(tree_parents), tuple(depths), tuple(names[node] for node in order))

    def check(self) -> None:
        """Slots, positions and budgets are computed from a tree's shape, so it must be one.

        Raises:
            ValueError: parents, depths and tokens do not make a tree.
        """
        depths: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent != -1 if node == 0 else not 0 <= parent < node:
                raise ValueError(f"node {node} of the draft tree names parent {parent}: the root has -1, others a node before them")
            depths.append(depths[parent] + 1 if node else 0)
        if not depths or depths != list(self.depths) or not len(self.token_ids) == len(self.sources) == len(depths):
            raise ValueError(f"depths {list(self.depths)} of {len(self.token_ids)} nodes do not follow from parents {list(self.parents)}")

    @property
    def num_draft_tokens(self) -> int:
        """Guessed tokens, the root excluded."""
        return len(self.token_ids) - 1

    @property
    def tree_depth(self) -> int:
        """Tokens on the longest path, the root excluded."""
        return self.depths[-1]

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` that holds `token_id`."""
        for candidate in range(node + 1, len(self.token_ids)):
            if self.parents[candidate] == node and self.token_ids[candidate] == token_id:
                return candidate
        return None

    def trim(self, *, vocab_size: int, max_depth: int, row_budget: int, layout: TreeLayout) -> "DraftTree":
        """The tree without ids that do not exist, nodes deeper than `max_depth`, and what exceeds `row_budget` rows in `layout`."""
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
        if len(kept) == len(self.token_ids):
            return self
        pick = [self.token_ids[node] for node in kept]
        return DraftTree(tuple(pick), tuple(parents), tuple(self.depths[n] for n in kept), tuple(self.sources[n] for n in kept))
