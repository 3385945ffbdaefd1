"""A layer cache for layers with a sliding window. Blocks that are wholly before the window are freed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache.block_pool import BlockHash, BlockPool
from paceline.kv_cache.full_attention import CopyPackedRow, PagedCache
from paceline.kv_cache.row_plan import CommittedPath, RowPlan, num_blocks_for

TRUNCATION_SLACK_ROWS = 128
"""How many rows before the window are kept. A sequence can be truncated by this many rows without losing rows of its window."""


@dataclass(frozen=True, slots=True)
class PassLimits:
    """The maximum load for which the caches of sliding windows have enough blocks.

    Attributes:
        max_sequences: maximum number of sequences that are longer than a window.
        max_pass_rows: maximum number of rows of a pass; all sequences shorter than a window may have as many cached rows in total.
    """

    max_sequences: int
    max_pass_rows: int


def num_window_blocks(window: int, num_blocks: int, limits: PassLimits | None, block_size: int) -> int:
    """Return how many blocks the `SlidingWindowCache` of a `KVCache` with `num_blocks` blocks needs: all of them if `limits` is None."""
    if limits is None:
        return num_blocks
    per_sequence = num_blocks_for(window + TRUNCATION_SLACK_ROWS, block_size) + 2  # + 2: the first and the last block may be partly used
    return min(num_blocks, limits.max_sequences * (per_sequence + 1) + num_blocks_for(limits.max_pass_rows, block_size))


@dataclass(slots=True)
class _BlockTable:
    """The blocks of one sequence. It owns `blocks[first:end]`; those before `first` have left the window."""

    first: int = 0
    end: int = 0
    blocks: NDArray[np.int32] = field(default_factory=lambda: np.zeros(8, np.int32))

    def append(self, blocks: Sequence[int]) -> None:
        end = self.end + len(blocks)
        if end > len(self.blocks):
            self.blocks = np.concatenate((self.blocks, np.zeros(end, np.int32)))
        self.blocks[self.end : end] = blocks
        self.end = end


class SlidingWindowCache(PagedCache):
    """Keys and values of layers with the same sliding window. It has its own blocks, and its own block table for each sequence.

    Sequences with the same prefix share full blocks, which would be impossible with a ring buffer. A block is removed from a table before
    it is freed, and added after it was allocated. So an interrupt may leak a block, but no block is freed while a table contains it.

    Args:
        storage, copy_packed_row: as for `PagedCache`.
        window: number of rows that a row attends to, itself included.
        block_size: rows per block, as in the cache.
    """

    def __init__(self, storage: Any, window: int, block_size: int, copy_packed_row: CopyPackedRow | None = None) -> None:
        super().__init__(storage, copy_packed_row)
        self.window = window
        self._size = block_size
        self.pool = BlockPool(storage.shape[1], block_size)
        self._tables: dict[int, _BlockTable] = {}

    def block_table(self, sequence_id: int) -> NDArray[np.int32]:
        """Return the block table of a sequence. Its entries before the window are invalid."""
        table = self._tables[sequence_id]
        return table.blocks[: table.end]

    def copy_block(self, source: int, target: int) -> None:
        """Do nothing: `source` and `target` are blocks of the `KVCache`, whereas this layer cache has its own blocks."""

    def reserve_rows(self, plan: RowPlan) -> None:
        """Allocate the blocks of the plan.

        Raises:
            CapacityError: too few blocks are free; nothing was changed.
        """
        table = self._tables.setdefault(plan.sequence_id, _BlockTable())
        missing = len(plan.block_table) - table.end
        if missing > 0:
            table.append(self.pool.allocate(missing))

    def keep_path(self, plan: RowPlan, path: CommittedPath) -> None:
        table, size = self._tables[plan.sequence_id], self._size
        blocks = table.blocks
        for source, target in path.moves:
            self.copy_row((int(blocks[source // size]), source % size), (int(blocks[target // size]), target % size))
        self._truncate(table, num_blocks_for(path.committed_len, size))
        first = self._first_visible_block(path.committed_len - TRUNCATION_SLACK_ROWS)
        if first > table.first:
            dropped, table.first = table.blocks[table.first : first].tolist(), first
            self.pool.release(dropped)

    def drop_reserved_rows(self, plan: RowPlan) -> None:
        table = self._tables.get(plan.sequence_id)
        if table is not None:
            self._truncate(table, num_blocks_for(plan.committed_len, self._size))

    def can_truncate(self, sequence_id: int, length: int) -> bool:
        table = self._tables.get(sequence_id)
        return length == 0 or (table is not None and self._first_visible_block(length) >= table.first)

    def num_resumable_blocks(self, block_hashes: Sequence[BlockHash]) -> int:
        count = index = len(block_hashes)
        while index > self._first_visible_block(count * self._size):
            index -= 1
            if self.pool.find_block(block_hashes[index]) is None:
                count = index
        return count

    def resume(self, sequence_id: int, length: int, block_hashes: Sequence[BlockHash]) -> None:
        table = self._tables.get(sequence_id)
        if table is None or self._first_visible_block(length) < table.first:
            self._start_from_prefix(sequence_id, length // self._size, block_hashes)
            return
        self._truncate(table, num_blocks_for(length, self._size))
        if length % self._size:
            self._make_last_writable(table)

    def register_prefix(self, sequence_id: int, first_index: int, block_hashes: Sequence[BlockHash]) -> None:
        table = self._tables[sequence_id]
        for index, block_hash in enumerate(block_hashes, first_index):
            if table.first <= index < table.end:
                self.pool.register(block_hash, int(table.blocks[index]))

    def evict(self, block_hash: BlockHash) -> None:
        block = self.pool.find_block(block_hash)
        if block is not None:
            self.pool.unregister(block)

    def release_sequence(self, sequence_id: int) -> None:
        table = self._tables.pop(sequence_id, None)
        if table is not None:
            self.pool.release(table.blocks[table.first : table.end][::-1].tolist())  # last block first, so that it is evicted first

    def _first_visible_block(self, length: int) -> int:
        """Return the index of the first block that a row at position `length` attends to."""
        return max(0, length - self.window + 1) // self._size

    def _truncate(self, table: _BlockTable, end: int) -> None:
        if end < table.end:
            dropped = table.blocks[max(end, table.first) : table.end][::-1].tolist()
            table.end, table.first = end, min(table.first, end)
            self.pool.release(dropped)

    def _start_from_prefix(self, sequence_id: int, count: int, block_hashes: Sequence[BlockHash]) -> None:
        """Start a sequence with the first `count` blocks of a cached prefix."""
        self.release_sequence(sequence_id)
        if count == 0:
            return
        first = self._first_visible_block(count * self._size)
        table = _BlockTable(first, first, np.zeros(count + 8, np.int32))
        blocks = [block for block_hash in block_hashes[first:count] if (block := self.pool.find_block(block_hash)) is not None]
        if len(blocks) < count - first:
            raise RuntimeError("a sequence resumes after blocks that were evicted")
        self.pool.add_owner(blocks)
        table.append(blocks)
        self._tables[sequence_id] = table

    def _make_last_writable(self, table: _BlockTable) -> None:
        """Copy the last block if other sequences own it as well, else remove it from the index."""
        block = int(table.blocks[table.end - 1])
        if self.pool.num_owners(block) > 1:
            (copy,) = self.pool.allocate(1)
            self.storage[:, copy] = self.storage[:, block]
            table.blocks[table.end - 1] = copy
            self.pool.release((block,))
        else:
            self.pool.unregister(block)
