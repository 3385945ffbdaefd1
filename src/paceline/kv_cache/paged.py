"""The key/value cache: one allocation in blocks, and the sequences that live in it."""

from collections.abc import Sequence
from typing import Any

from paceline.errors import CapacityError
from paceline.kv_cache.block_pool import BlockPool
from paceline.kv_cache.row_plan import RowPlan, TreeLayout, blocks_for, fresh_blocks_needed, plan_rows

BLOCK_SIZE = 32
"""Slots per block; OpenVINO's PagedAttention knows no other."""


class CachedSequence:
    """Where one sequence's keys and values are.

    Slots [0, committed_len) hold committed rows; [committed_len, tentative_len) belong to the pass under way.
    """

    __slots__ = ("block_table", "committed_len", "plan")

    def __init__(self) -> None:
        self.block_table: list[int] = []
        self.committed_len = 0
        self.plan: RowPlan | None = None

    @property
    def tentative_len(self) -> int:
        """Committed rows plus the longest path of the pass under way."""
        if self.plan is None:
            return self.committed_len
        return self.committed_len + max(path.num_rows for path in self.plan.paths)


class KVCache:
    """Blocks of one storage array [2·L, num_blocks, K, block_size, D], keys of layer i at 2·i, values at 2·i + 1.

    `storage` is whatever the runtime computes with (a numpy array or a torch tensor): only indexing is used here.
    """

    def __init__(self, storage: Any, layout: TreeLayout = TreeLayout.PATHS) -> None:
        self.storage = storage
        self.layout = layout
        self.block_size = int(storage.shape[3])
        self.pool = BlockPool(int(storage.shape[1]))
        self._sequences: dict[int, CachedSequence] = {}

    @property
    def max_slots(self) -> int:
        """Rows the whole cache can hold."""
        return (self.pool.num_blocks - 1) * self.block_size

    def new_sequence(self) -> CachedSequence:
        """An empty sequence that owns no block yet."""
        sequence = CachedSequence()
        self._sequences[id(sequence)] = sequence
        return sequence

    def reserve(self, sequence: CachedSequence, parents: Sequence[int]) -> RowPlan:
        """Provide slots for a tree (parents[0] = -1) and lay it out; blocks that paths share partly are copied.

        Raises:
            CapacityError: too few free blocks; nothing was changed.
        """
        if sequence.plan is not None:
            raise RuntimeError("a pass is under way for this sequence: keep a path or cancel it first")
        length, table = sequence.committed_len, sequence.block_table
        needed = fresh_blocks_needed(parents, length, len(table), self.layout, self.block_size)
        plan = plan_rows(parents, length, table, self.pool.allocate(needed), self.layout, self.block_size)
        for source, target in plan.copies:
            self.storage[:, target] = self.storage[:, source]
        sequence.plan = plan
        return plan

    def keep_path(self, sequence: CachedSequence, node: int) -> None:
        """Commit the path from the root to `node` of the reserved tree; its other slots are given back."""
        plan = self._plan_of(sequence)
        commit = plan.commit(node)
        for source, target in commit.moves:
            self.storage[:, commit.block_table[target // self.block_size], :, target % self.block_size] = self.storage[
                :, plan.paths[0].block_table[source // self.block_size], :, source % self.block_size
            ]
        kept = set(commit.block_table)
        self.pool.release(block for block in (*sequence.block_table, *plan.fresh_blocks) if block not in kept)
        sequence.block_table = list(commit.block_table)
        sequence.committed_len = commit.committed_len
        sequence.plan = None

    def cancel(self, sequence: CachedSequence) -> None:
        """Drop what was reserved; the committed rows stay."""
        if sequence.plan is not None:
            self.pool.release(sequence.plan.fresh_blocks)
            sequence.plan = None

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Keep the first `length` committed rows; a tail block that others own too becomes a copy, for rows will follow in it.

        Raises:
            CapacityError: no block is free for that copy; nothing was changed.
        """
        if not 0 <= length <= sequence.committed_len:
            raise ValueError(f"cannot truncate {sequence.committed_len} committed rows to {length}")
        keep, table = blocks_for(length, self.block_size), sequence.block_table
        shares_tail = length % self.block_size > 0 and self.pool.num_owners(table[keep - 1]) > 1
        own = self.pool.allocate(int(shares_tail))
        self.cancel(sequence)
        if shares_tail:
            self.storage[:, own[0]] = self.storage[:, table[keep - 1]]
            keep -= 1
        self.pool.release(table[keep:])
        table[keep:] = own
        sequence.committed_len = length

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """A second sequence with the same committed rows: full blocks shared, the partial tail copied.

        Raises:
            CapacityError: no block is free for the tail; nothing was changed.
        """
        shared = sequence.committed_len // self.block_size
        has_tail = sequence.committed_len % self.block_size > 0
        own = self.pool.allocate(int(has_tail))
        twin = self.new_sequence()
        self.pool.share(sequence.block_table[:shared])
        if has_tail:
            self.storage[:, own[0]] = self.storage[:, sequence.block_table[shared]]
        twin.block_table = sequence.block_table[:shared] + own
        twin.committed_len = sequence.committed_len
        return twin

    def release(self, sequence: CachedSequence) -> None:
        """Give every block back; the sequence must not be used again."""
        if self._sequences.pop(id(sequence), None) is None:  # its blocks may have new owners
            raise RuntimeError("the sequence was released before, or is another cache's")
        self.cancel(sequence)
        self.pool.release(sequence.block_table)

    def check(self) -> None:
        """Raise RuntimeError unless every taken block belongs to exactly the sequences that name it."""
        tables: list[Sequence[int]] = []
        for sequence in self._sequences.values():
            if len(sequence.block_table) != blocks_for(sequence.committed_len, self.block_size):
                raise RuntimeError(f"{sequence.committed_len} committed rows stand in {len(sequence.block_table)} blocks")
            tables.append(sequence.block_table)
            if sequence.plan is not None:
                tables.append(sequence.plan.fresh_blocks)
        self.pool.check(tables)

    def _plan_of(self, sequence: CachedSequence) -> RowPlan:
        if sequence.plan is None:
            raise RuntimeError("no pass is under way for this sequence: reserve first")
        return sequence.plan


def blocks_in(num_bytes: int, block_bytes: int) -> int:
    """Whole blocks that fit `num_bytes`.

    Raises:
        CapacityError: not even a scratch block and one more fit.
    """
    count = num_bytes // block_bytes
    if count < 2:
        raise CapacityError(
            f"a cache of {num_bytes / 1e9:.2g} GB holds {count} blocks of {block_bytes} bytes; at least 2 are needed: raise cache_gb"
        )
    return count
