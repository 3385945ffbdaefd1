"""Layer caches that store keys and values of all rows in the blocks of the cache (paged attention)."""

from collections.abc import Callable
from typing import Any

from paceline.kv_cache.layer_cache import LayerCache
from paceline.kv_cache.row_plan import Commit, RowPlan

_FILL_BYTE = 0x3C  # repeated, this byte is a small finite number in every type


Slot = tuple[int, int]
"""A row of the cache: its block, and its index in the block."""


class PagedCache(LayerCache):
    """A layer cache with data for each row, in an array whose axis 1 is the blocks of the cache.

    Without a subclass it is used for data that are written only for committed rows, so that `keep_path` need not move rows.

    Args:
        storage: numpy array or torch tensor. It may have more blocks than the cache.
        copy_packed: if a runtime packs rows in a layout of its own, copies a row of all layers and heads in storage from one slot to
            another; None = storage is not packed, and axis 3 is the index of a row in its block.
    """

    def __init__(self, storage: Any, copy_packed: Callable[[Any, Slot, Slot], None] | None = None) -> None:
        self.storage, self.copy_packed = storage, copy_packed

    @property
    def num_bytes(self) -> int:
        return int(self.storage.nbytes)

    def copy_block(self, source: int, target: int) -> None:
        self.storage[:, target] = self.storage[:, source]

    def copy_row(self, source: Slot, target: Slot) -> None:
        """Copy one row."""
        if self.copy_packed is None:
            self.storage[:, target[0], :, target[1]] = self.storage[:, source[0], :, source[1]]
        else:
            self.copy_packed(self.storage, source, target)

    def fill_block(self, block: int) -> None:
        """Fill a block with small numbers, so that the system has allocated its memory before a pass over it is timed."""
        self.storage[:, block] = 0.01 if self.copy_packed is None else _FILL_BYTE


class FullAttentionCache(PagedCache):
    """Keys and values of layers without a window: an array as `KVGroup.shape` describes it, or packed.

    If a tree has branches, `keep_path` moves the rows of the kept path together.
    """

    def keep_path(self, plan: RowPlan, commit: Commit) -> None:
        size, table = plan.block_size, plan.block_table
        for source, target in commit.moves:
            self.copy_row((table[source // size], source % size), (table[target // size], target % size))
