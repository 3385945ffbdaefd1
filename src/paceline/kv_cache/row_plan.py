"""Assigns the nodes of a draft tree to rows of a pass, and computes how the cache changes when a path is committed. Pure functions.

The root of the tree follows `committed_len` cached rows. A slot is the index of a row in its sequence. There are three layouts:

    chain   one path: node i takes slot committed_len + i of the sequence's own blocks.
    paths   each root-to-leaf path is a sequence of its own. Full blocks of the prefix are shared. Path 0 uses the sequence's last,
            partly filled block; every other path gets a copy of it. Ancestors of several paths are computed once per path. To commit a
            path, its blocks become those of the sequence, and no row is moved.
    mask    one range: node i takes slot committed_len + i at any depth and attends to its ancestors through a mask.
            To commit a path, its rows are moved so that they follow the committed rows without gaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TreeLayout(Enum):
    """How the nodes of a tree become rows of a pass. A tree without branches always has the layout `CHAIN`."""

    CHAIN = "chain"
    PATHS = "paths"
    MASK = "mask"


class PathRows(NamedTuple):
    """The rows of a pass that use one block table: rows [first_row, first_row + num_rows) of the plan."""

    first_row: int
    num_rows: int
    nodes: Sequence[int]
    block_table: Sequence[int]
    mask: NDArray[np.bool_] | None = None


class Commit(NamedTuple):
    """The result of committing the path from the root to a node.

    Attributes:
        block_table, committed_len: blocks and length of the sequence afterwards.
        rows: the rows of the plan that are kept, from the root on.
        moves: rows to move first, as (source slot, target slot), in order.
    """

    block_table: Sequence[int]
    committed_len: int
    rows: Sequence[int]
    moves: Sequence[tuple[int, int]] = ()


@dataclass(slots=True)
class RowPlan:
    """The rows of one sequence in a pass. Immutable, but not frozen, because creating a frozen dataclass is slower.

    Attributes:
        layout: layout of the tree.
        parents: [N] parent of each node, -1 for the root.
        committed_len: number of rows in the cache before the pass.
        block_size: rows per block.
        row_nodes, row_positions: [num_rows] node and position of each row.
        row_of_node: [N] a row of each node.
        paths: the rows by the block table that they use.
        copies: (source, target) blocks to copy before the pass.
        fresh_blocks: blocks that were allocated for the pass.
        sequence_id: id of the sequence in its cache; 0 = it belongs to no cache.
        num_prefill, pinned_len: see `KVCache.reserve`.
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
    num_prefill: int = 1
    pinned_len: int | None = None

    @property
    def num_rows(self) -> int:
        return len(self.row_nodes)

    def commit(self, node: int) -> Commit:
        """Return how the cache changes if the rows from the root to `node` are committed."""
        if not 0 <= node < len(self.parents):
            raise ValueError(f"node {node} is not in the tree of {len(self.parents)} nodes")
        path, rows, moves = self.paths[0], range(node + 1), list[tuple[int, int]]()
        if self.layout is TreeLayout.MASK:
            kept = path_to(self.parents, node)
            moves = [(self.committed_len + row, self.committed_len + depth) for depth, row in enumerate(kept) if row != depth]
            return self._commit(path, kept, moves)
        if self.layout is TreeLayout.PATHS:
            path = next(path for path in self.paths if node in path.nodes)
            rows = range(path.first_row, path.first_row + path.nodes.index(node) + 1)
        return self._commit(path, rows, moves)

    def _commit(self, path: PathRows, rows: Sequence[int], moves: Sequence[tuple[int, int]]) -> Commit:
        new_len = self.committed_len + len(rows)
        return Commit(path.block_table[: blocks_for(new_len, self.block_size)], new_len, rows, moves)


def blocks_for(num_slots: int, block_size: int) -> int:
    """Return the number of blocks that hold `num_slots` rows."""
    return -(-num_slots // block_size)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes from the root to `node`, both included."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def root_to_leaf_paths(parents: Sequence[int]) -> list[list[int]]:
    """Return every root-to-leaf path, in the order of the leaves."""
    inner = set(parents)
    return [path_to(parents, node) for node in range(len(parents)) if node not in inner]


def is_chain(parents: Sequence[int]) -> bool:
    """Return whether every node is the parent of the next."""
    return isinstance(parents, range) or all(parent == node - 1 for node, parent in enumerate(parents))


def num_rows(parents: Sequence[int], layout: TreeLayout) -> int:
    """Return the number of rows that a tree takes in `layout`. With PATHS, a node is counted once for each path through it."""
    if layout is not TreeLayout.PATHS or is_chain(parents):
        return len(parents)
    return sum(map(len, root_to_leaf_paths(parents)))


def fresh_blocks_needed(parents: Sequence[int], committed_len: int, num_blocks: int, layout: TreeLayout, block_size: int) -> int:
    """Return the number of blocks that a tree needs besides the `num_blocks` blocks of its sequence."""
    if layout is TreeLayout.MASK or is_chain(parents):
        return blocks_for(committed_len + len(parents), block_size) - num_blocks
    if layout is TreeLayout.CHAIN:
        raise ValueError("a branching tree cannot be laid out as a chain")
    lengths = [len(path) for path in root_to_leaf_paths(parents)]
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
    """Assign the nodes of a tree to rows after `committed_len` cached rows.

    Args:
        parents: parent of each node, parents[0] = -1 and parents[i] < i.
        block_table: the blocks of the committed rows.
        fresh_blocks: newly allocated blocks, as many as `fresh_blocks_needed` returns.
        sequence_id: id of the sequence in its cache.
    """
    nodes, fresh, mask = range(len(parents)), tuple(fresh_blocks), None
    positions: Sequence[int] = range(committed_len, committed_len + len(parents))
    if is_chain(parents):
        layout = TreeLayout.CHAIN
    elif layout is TreeLayout.MASK:
        mask = tree_mask(parents)
        positions = (committed_len - 1 + mask.sum(axis=1)).tolist()
    else:
        return _plan_paths(parents, committed_len, block_table, fresh, block_size, sequence_id)
    path = PathRows(0, len(parents), nodes, [*block_table, *fresh], mask)
    return RowPlan(layout, parents, committed_len, block_size, nodes, positions, nodes, (path,), (), fresh, sequence_id)


def tree_mask(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Return [N, N], True where the node of the row attends to the node of the column: to itself and its ancestors."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node in range(1, len(parents)):
        mask[node] |= mask[parents[node]]
    return mask


def _plan_paths(
    parents: Sequence[int], committed_len: int, block_table: Sequence[int], fresh: tuple[int, ...], block_size: int, sequence_id: int
) -> RowPlan:
    shared, has_partial_tail = divmod(committed_len, block_size)
    nodes, positions, row_of_node = list[int](), list[int](), [-1] * len(parents)
    paths, copies, used = list[PathRows](), list[tuple[int, int]](), 0
    for path in root_to_leaf_paths(parents):
        prefix = block_table if not paths else block_table[:shared]
        count = blocks_for(committed_len + len(path), block_size) - len(prefix)
        own, used = fresh[used : used + count], used + count
        if paths and has_partial_tail:
            copies.append((block_table[shared], own[0]))
        paths.append(PathRows(len(nodes), len(path), path, [*prefix, *own]))
        for depth, node in enumerate(path):
            if row_of_node[node] < 0:
                row_of_node[node] = len(nodes)
            nodes.append(node)
            positions.append(committed_len + depth)
    return RowPlan(
        TreeLayout.PATHS, parents, committed_len, block_size, nodes, positions, row_of_node, tuple(paths), tuple(copies), fresh, sequence_id
    )
