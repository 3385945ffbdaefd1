"""Assigns the nodes of a draft tree to rows of a pass, and computes how the cache changes when a path is committed.

The root of the tree follows `committed_len` cached rows. A slot is the index of a row in its sequence. Node i is row i of the plan and
takes slot committed_len + i. If the tree has branches, each row attends to its ancestors through a mask. To commit a path, its rows are
moved so that they follow the committed rows without gaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class CommittedPath(NamedTuple):
    """How the cache changes when the path from the root to a node is committed.

    Attributes:
        block_table, committed_len: block table and length of the sequence afterwards.
        rows: the rows of the pass that are committed, from the root on.
        moves: (source slot, target slot) of rows to copy, in this order.
    """

    block_table: Sequence[int]
    committed_len: int
    rows: Sequence[int]
    moves: Sequence[tuple[int, int]] = ()


@dataclass(slots=True)
class RowPlan:
    """The rows of one sequence in a pass. Immutable, but not frozen, because creating a frozen dataclass is slower.

    Attributes:
        parents: [N] parent of each node, -1 for the root.
        committed_len: number of rows in the cache before the pass.
        block_size: rows per block.
        positions: [N] position of each row.
        block_table: blocks of the committed rows, then `fresh_blocks`.
        mask: [N, N], True = the row may attend to the other row; None = the tree is a chain, and rows attend to all earlier ones.
        fresh_blocks: blocks that were allocated for the pass.
        sequence_id: id of the sequence in its cache; 0 = it belongs to no cache.
        num_prefill_rows, pinned_len: see `KVCache.reserve_rows`.
    """

    parents: Sequence[int]
    committed_len: int
    block_size: int
    positions: Sequence[int]
    block_table: Sequence[int]
    mask: NDArray[np.bool_] | None = None
    fresh_blocks: tuple[int, ...] = ()
    sequence_id: int = 0
    num_prefill_rows: int = 1
    pinned_len: int | None = None

    @property
    def num_rows(self) -> int:
        return len(self.parents)

    def committed_path(self, node: int) -> CommittedPath:
        """Return the path from the root to `node`, and the moves that put its rows directly after the committed rows."""
        if not 0 <= node < len(self.parents):
            raise ValueError(f"node {node} is not in the tree of {len(self.parents)} nodes")
        rows: Sequence[int] = range(node + 1) if self.mask is None else path_to(self.parents, node)
        new_len, moves = self.committed_len + len(rows), list[tuple[int, int]]()
        if self.mask is not None:
            moves = [(self.committed_len + row, self.committed_len + depth) for depth, row in enumerate(rows) if row != depth]
        return CommittedPath(self.block_table[: num_blocks_for(new_len, self.block_size)], new_len, rows, moves)


def num_blocks_for(num_rows: int, block_size: int) -> int:
    """Return the number of blocks that hold `num_rows` rows."""
    return -(-num_rows // block_size)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes from the root to `node`, both included."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def is_chain(parents: Sequence[int]) -> bool:
    """Return whether every node is the parent of the next."""
    return isinstance(parents, range) or all(parent == node - 1 for node, parent in enumerate(parents))


def plan_rows(
    parents: Sequence[int],
    committed_len: int,
    block_table: Sequence[int],
    fresh_blocks: Sequence[int],
    block_size: int,
    sequence_id: int = 0,
    num_prefill_rows: int = 1,
    pinned_len: int | None = None,
) -> RowPlan:
    """Assign the nodes of a draft tree to rows after `committed_len` cached rows.

    Args:
        parents: parent of each node, parents[0] = -1 and parents[i] < i.
        block_table: the blocks of the committed rows.
        fresh_blocks: newly allocated blocks for the slots after those of `block_table`.
        sequence_id, num_prefill_rows, pinned_len: as in `RowPlan`.
    """
    fresh, mask, block_table = tuple(fresh_blocks), None, [*block_table, *fresh_blocks]
    positions: Sequence[int] = range(committed_len, committed_len + len(parents))
    if not is_chain(parents):
        mask = tree_mask(parents)
        positions = (committed_len - 1 + mask.sum(axis=1)).tolist()
    return RowPlan(parents, committed_len, block_size, positions, block_table, mask, fresh, sequence_id, num_prefill_rows, pinned_len)


def tree_mask(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Return [N, N]; element (i, j) is True if node i attends to node j, which is node i itself or one of its ancestors."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node in range(1, len(parents)):
        mask[node] |= mask[parents[node]]
    return mask
