"""How the nodes of a draft tree become rows of a pass, and what committing a node does to the cache. Pure functions.

Layouts of a tree whose root continues `committed_len` cached rows (slot = index of a row in its sequence):

    chain   one path: node i takes slot committed_len + i of the sequence's own blocks.
    paths   each root-to-leaf path is a sequence of its own. Full prefix blocks are shared; path 0 goes on in the sequence's
            own tail block, every other path gets fresh blocks, the first one a copy of the partial tail. Shared ancestors
            are computed once per path. Committing adopts the winning path's blocks: no row moves.
    mask    one range: node i takes slot committed_len + i whatever its depth and sees its ancestors through a mask.
            Committing moves the kept rows down so that they stand behind the committed ones without gaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TreeLayout(Enum):
    """How a tree is laid out in a pass; `CHAIN` is what the other two become when nothing branches."""

    CHAIN = "chain"
    PATHS = "paths"
    MASK = "mask"


class PathRows(NamedTuple):
    """Rows [first_row, first_row + num_rows) of the plan and the blocks they are cached in."""

    first_row: int
    num_rows: int
    nodes: Sequence[int]
    block_table: Sequence[int]
    mask: NDArray[np.bool_] | None = None


class Commit(NamedTuple):
    """The sequence after a node was kept.

    Attributes:
        block_table, committed_len: its blocks and its length.
        rows: the plan's rows that are kept, from the root on.
        moves: rows to move first (source slot, target slot), in order.
    """

    block_table: Sequence[int]
    committed_len: int
    rows: Sequence[int]
    moves: Sequence[tuple[int, int]] = ()


@dataclass(slots=True)
class RowPlan:
    """Rows of one sequence in a pass. Not changed once it is made; to say so to Python takes longer than to make it.

    Attributes:
        layout: the layout in use.
        parents: [N] parent of each node, -1 for the root.
        committed_len: rows already in the cache.
        block_size: slots per block.
        row_nodes, row_positions: [num_rows] node and position of each row.
        row_of_node: [N] one row of each node.
        paths: the block tables the rows run with.
        copies: (source, target) blocks to copy before the pass.
        fresh_blocks: blocks this plan took; those that no commit adopts are released.
        sequence_id: whose rows these are, by the cache's count; 0 = nobody's.
        num_known: so many nodes from the root on are a chain that is kept whole, if anything is.
        num_firm: committed rows that are never cut; None = all.
    """

    layout: TreeLayout
    parents: Sequence[int]
    committed_len: int
    block_size: int
    row_nodes: Sequence[int]
    row_positions: Sequence[int]
    row_of_node: Sequence[int]
    paths: tuple[PathRows, ...]
    copies: tuple[tuple[int, int], ...] = ()
    fresh_blocks: tuple[int, ...] = ()
    sequence_id: int = 0
    num_known: int = 1
    num_firm: int | None = None

    @property
    def num_rows(self) -> int:
        """What the plan costs."""
        return len(self.row_nodes)

    def commit(self, node: int) -> Commit:
        """What keeping the path from the root to `node` does."""
        if not 0 <= node < len(self.parents):
            raise ValueError(f"node {node} is not in the tree of {len(self.parents)} nodes")
        if self.layout is TreeLayout.CHAIN:
            new_len = self.committed_len + node + 1
            return Commit(self.paths[0].block_table[: blocks_for(new_len, self.block_size)], new_len, range(node + 1))
        if self.layout is TreeLayout.MASK:
            kept = path_to(self.parents, node)
            moves = [(self.committed_len + row, self.committed_len + depth) for depth, row in enumerate(kept) if row != depth]
            new_len = self.committed_len + len(kept)
            return Commit(self.paths[0].block_table[: blocks_for(new_len, self.block_size)], new_len, kept, moves)
        path = next(path for path in self.paths if node in path.nodes)
        count = path.nodes.index(node) + 1
        new_len, rows = self.committed_len + count, range(path.first_row, path.first_row + count)
        return Commit(path.block_table[: blocks_for(new_len, self.block_size)], new_len, rows)


def blocks_for(num_slots: int, block_size: int) -> int:
    """Blocks that hold `num_slots` rows."""
    return -(-num_slots // block_size)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def root_paths(parents: Sequence[int]) -> list[list[int]]:
    """Every root-to-leaf path, in the order of the leaves."""
    inner = set(parents)
    return [path_to(parents, node) for node in range(len(parents)) if node not in inner]


def is_chain(parents: Sequence[int]) -> bool:
    """Whether every node is the parent of the next."""
    return isinstance(parents, range) or all(parent == node - 1 for node, parent in enumerate(parents))


def num_rows(parents: Sequence[int], layout: TreeLayout) -> int:
    """Rows a tree costs in `layout`: with paths a shared ancestor counts once per leaf."""
    if layout is not TreeLayout.PATHS or is_chain(parents):
        return len(parents)
    return sum(map(len, root_paths(parents)))


def fresh_blocks_needed(parents: Sequence[int], committed_len: int, num_blocks: int, layout: TreeLayout, block_size: int) -> int:
    """Blocks to allocate before `plan_rows`; `num_blocks` is the length of the sequence's own table."""
    if layout is TreeLayout.MASK or is_chain(parents):
        return blocks_for(committed_len + len(parents), block_size) - num_blocks
    if layout is TreeLayout.CHAIN:  # said here, before blocks are taken
        raise ValueError("a branching tree cannot be laid out as a chain")
    lengths = [len(path) for path in root_paths(parents)]
    shared = committed_len // block_size
    own = blocks_for(committed_len + lengths[0], block_size) - num_blocks
    return own + sum(blocks_for(committed_len + length, block_size) - shared for length in lengths[1:])


def plan_rows(
    parents: Sequence[int],
    committed_len: int,
    block_table: Sequence[int],
    fresh_blocks: Sequence[int],
    layout: TreeLayout,
    block_size: int,
    sequence_id: int = 0,
) -> RowPlan:
    """Lay a tree out behind `committed_len` cached rows.

    Args:
        parents: parent of each node, parents[0] = -1 and parents[i] < i.
        block_table: the sequence's own blocks, exactly `blocks_for(committed_len)` of them.
        fresh_blocks: as many as `fresh_blocks_needed` says.
        sequence_id: whose rows these are.
    """
    fresh = tuple(fresh_blocks)
    if is_chain(parents):
        nodes = range(len(parents))
        positions = range(committed_len, committed_len + len(parents))
        path = PathRows(0, len(parents), nodes, [*block_table, *fresh])
        return RowPlan(TreeLayout.CHAIN, parents, committed_len, block_size, nodes, positions, nodes, (path,), (), fresh, sequence_id)
    plan = _plan_mask if layout is TreeLayout.MASK else _plan_paths
    return plan(parents, committed_len, block_table, fresh, block_size, sequence_id)


def tree_mask(parents: Sequence[int]) -> NDArray[np.bool_]:
    """[N, N], True where the row's node may attend to the column's: its ancestors and itself."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node in range(1, len(parents)):
        mask[node] |= mask[parents[node]]
    return mask


def _plan_mask(
    parents: Sequence[int], committed_len: int, block_table: Sequence[int], fresh: tuple[int, ...], block_size: int, sequence_id: int
) -> RowPlan:
    mask = tree_mask(parents)
    nodes = range(len(parents))
    positions = (committed_len - 1 + mask.sum(axis=1)).tolist()
    path = PathRows(0, len(parents), nodes, [*block_table, *fresh], mask)
    return RowPlan(TreeLayout.MASK, parents, committed_len, block_size, nodes, positions, nodes, (path,), (), fresh, sequence_id)


def _plan_paths(
    parents: Sequence[int], committed_len: int, block_table: Sequence[int], fresh: tuple[int, ...], block_size: int, sequence_id: int
) -> RowPlan:
    shared, has_partial_tail = divmod(committed_len, block_size)
    row_nodes: list[int] = []
    row_positions: list[int] = []
    row_of_node = [-1] * len(parents)
    paths: list[PathRows] = []
    copies: list[tuple[int, int]] = []
    taken = 0
    for nodes in root_paths(parents):
        prefix = block_table if not paths else block_table[:shared]
        count = blocks_for(committed_len + len(nodes), block_size) - len(prefix)
        own = fresh[taken : taken + count]
        taken += count
        if paths and has_partial_tail:
            copies.append((block_table[shared], own[0]))
        paths.append(PathRows(len(row_nodes), len(nodes), nodes, [*prefix, *own]))
        for depth, node in enumerate(nodes):
            if row_of_node[node] < 0:
                row_of_node[node] = len(row_nodes)
            row_nodes.append(node)
            row_positions.append(committed_len + depth)
    return RowPlan(
        TreeLayout.PATHS, parents, committed_len, block_size, row_nodes, row_positions, row_of_node, tuple(paths), tuple(copies), fresh,
        sequence_id,
    )  # fmt: skip
