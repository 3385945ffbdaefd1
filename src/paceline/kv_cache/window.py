"""Keys and values of layers that see a window of the text: blocks behind it are given back."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CapacityError
from paceline.kv_cache.key_values import PagedRows, RowLayout
from paceline.kv_cache.prefix_index import Link
from paceline.kv_cache.row_plan import Commit, RowPlan, blocks_for

KEPT_BEHIND = 128
"""Rows behind the window that stay, so that a sequence whose last rows are cut can go on."""


@dataclass(frozen=True, slots=True)
class PassLimits:
    """What runs in a cache at a time, at most: sequences longer than a window, and rows of a pass or of all short sequences.

    Where more runs, blocks for layers with a window may be lacking although the cache has some.
    """

    max_sequences: int
    max_rows: int


def window_blocks(window: int, num_blocks: int, limits: PassLimits | None, block_size: int) -> int:
    """Blocks that layers with a window need beside a cache of `num_blocks`; without limits as many."""
    if limits is None:
        return num_blocks
    of_each = blocks_for(window + KEPT_BEHIND, block_size) + 2  # the first and the last may be held in part
    return min(num_blocks, limits.max_sequences * (of_each + 1) + blocks_for(limits.max_rows, block_size))


@dataclass(slots=True)
class _Table:
    """The blocks of one sequence: those from index `first` to `end` are held."""

    first: int = 0
    end: int = 0
    blocks: NDArray[np.int32] = field(default_factory=lambda: np.zeros(8, np.int32))

    def append(self, blocks: Sequence[int]) -> None:
        end = self.end + len(blocks)
        if end > len(self.blocks):
            self.blocks = np.concatenate((self.blocks, np.zeros(end, np.int32)))
        self.blocks[self.end : end] = blocks
        self.end = end


class WindowKeyValues(PagedRows):
    """As `KeyValues`, for layers with one window; each sequence has blocks of its own here, of the size of the cache's.

    Full blocks can be adopted until their room is needed: they are shared, which a ring of rows could not be. Blocks leave a table before
    they are given back and enter it once they are owned: an interrupt between loses some, and never gives one out twice.

    Args:
        storage, rows: as of `KeyValues`.
        window: rows that a row sees, itself included.
    """

    def __init__(self, storage: Any, window: int, block_size: int, rows: RowLayout | None = None) -> None:
        super().__init__(storage, rows)
        self.window = window
        self._size = block_size
        self._free = list(range(storage.shape[1] - 1, -1, -1))
        self._owners = [0] * storage.shape[1]
        self._tables: dict[int, _Table] = {}
        self._block_of: dict[Link, int] = {}
        self._link_of: dict[int, Link] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # known and without owners, in the order of their last use

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free) + len(self._idle)

    def table(self, sequence_id: int) -> NDArray[np.int32]:
        """The block of each run of rows of a sequence, as the cache's block table; those behind the window name none of its own."""
        table = self._tables[sequence_id]
        return table.blocks[: table.end]

    def num_held(self, sequence_id: int) -> int:
        """Blocks of a sequence."""
        table = self._tables.get(sequence_id)
        return 0 if table is None else table.end - table.first

    def copy_block(self, source: int, target: int) -> None:
        """Nothing: these are the cache's blocks, not those of this memory."""

    def reserve(self, plan: RowPlan) -> None:
        """Raises CapacityError: no blocks are left; nothing was changed."""
        table = self._tables.setdefault(plan.sequence_id, _Table())
        wanted = len(plan.paths[0].block_table) - table.end
        if wanted > 0:
            table.append(self._take(wanted))

    def keep_path(self, plan: RowPlan, commit: Commit) -> None:
        table, size = self._tables[plan.sequence_id], self._size
        blocks = table.blocks
        for source, target in commit.moves:
            self.copy_row((int(blocks[source // size]), source % size), (int(blocks[target // size]), target % size))
        self._cut(table, blocks_for(commit.committed_len, size))
        first = self._first_seen(commit.committed_len - KEPT_BEHIND)
        if first > table.first:
            behind, table.first = table.blocks[table.first : first].tolist(), first
            self._give_back(behind)

    def cancel(self, plan: RowPlan) -> None:
        table = self._tables.get(plan.sequence_id)
        if table is not None:
            self._cut(table, blocks_for(plan.committed_len, self._size))

    def can_cut(self, sequence_id: int, length: int) -> bool:
        table = self._tables.get(sequence_id)
        return length == 0 or (table is not None and self._first_seen(length) >= table.first)

    def num_reachable(self, links: Sequence[Link]) -> int:
        count = index = len(links)
        while index > self._first_seen(count * self._size):
            index -= 1
            if links[index] not in self._block_of:
                count = index
        return count

    def restart(self, sequence_id: int, length: int, links: Sequence[Link]) -> None:
        table = self._tables.get(sequence_id)
        if table is None or self._first_seen(length) < table.first:
            self._adopt(sequence_id, length // self._size, links)
            return
        self._cut(table, blocks_for(length, self._size))
        if length % self._size:  # rows will follow in the last block
            self._own_last(table)

    def remember(self, sequence_id: int, first: int, links: Sequence[Link]) -> None:
        table = self._tables[sequence_id]
        for index, link in enumerate(links, first):
            if table.first <= index < table.end and link not in self._block_of:
                block = int(table.blocks[index])
                if block not in self._link_of:
                    self._block_of[link], self._link_of[block] = block, link

    def forget(self, link: Link) -> None:
        block = self._block_of.pop(link, None)
        if block is not None:
            del self._link_of[block]
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def release(self, sequence_id: int) -> None:
        table = self._tables.pop(sequence_id, None)
        if table is not None:
            self._give_back(table.blocks[table.first : table.end][::-1].tolist())  # the beginning is of more use to others

    def check(self) -> None:
        """Raise RuntimeError unless every block is owned as often as tables name it, idle, or free."""
        owners = [0] * len(self._owners)
        for table in self._tables.values():
            for block in table.blocks[table.first : table.end]:
                owners[block] += 1
        unowned = sorted([*self._free, *self._idle])
        if owners != self._owners or unowned != [block for block, count in enumerate(owners) if not count]:
            raise RuntimeError("blocks of a window are owned by none or by too many")
        if {block: link for link, block in self._block_of.items()} != self._link_of or not self._idle.keys() <= self._link_of.keys():
            raise RuntimeError("links and blocks of a window do not belong together")

    def _first_seen(self, length: int) -> int:
        """The first block that rows behind `length` rows may see."""
        return max(0, length - self.window + 1) // self._size

    def _take(self, count: int) -> list[int]:
        if count > self.num_free:
            raise CapacityError(f"{count} blocks of layers with a window were asked for, {self.num_free} are free: raise kv_cache_gb")
        taken = []
        for _ in range(count):
            if not self._free:
                self.forget(self._link_of[next(iter(self._idle))])
            block = self._free.pop()
            self._owners[block] = 1
            taken.append(block)
        return taken

    def _give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._owners[block] -= 1
            if self._owners[block] == 0:
                if block in self._link_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def _cut(self, table: _Table, end: int) -> None:
        if end < table.end:
            beyond = table.blocks[max(end, table.first) : table.end][::-1].tolist()
            table.end, table.first = end, min(table.first, end)
            self._give_back(beyond)

    def _adopt(self, sequence_id: int, count: int, links: Sequence[Link]) -> None:
        """Begin behind `count` full blocks that are known."""
        self.release(sequence_id)
        if count == 0:
            return
        first = self._first_seen(count * self._size)
        table = _Table(first, first, np.zeros(count + 8, np.int32))
        table.append([self._block_of[link] for link in links[first:count]])
        for block in table.blocks[first:count].tolist():
            self._idle.pop(block, None)
            self._owners[block] += 1
        self._tables[sequence_id] = table

    def _own_last(self, table: _Table) -> None:
        """Make the last block one that may be written to."""
        block = int(table.blocks[table.end - 1])
        if self._owners[block] > 1:
            (copy,) = self._take(1)
            self.storage[:, copy] = self.storage[:, block]
            table.blocks[table.end - 1] = copy
            self._give_back((block,))
        elif block in self._link_of:
            self.forget(self._link_of[block])
