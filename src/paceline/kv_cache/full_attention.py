"""Layer caches that store keys and values of all rows in the blocks of the cache (paged attention)."""

from typing import Any, Protocol

from paceline.kv_cache.layer_cache import LayerCache
from paceline.kv_cache.row_plan import Commit, RowPlan

_FILL_BYTE = 0x3C  # repeated, this byte is a small finite number in every type


class RowLayout(Protocol):
    """Copies a row in storage that a runtime's kernels pack in a layout of their own."""

    def copy(self, storage: Any, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Copy one row of all layers and heads from `source` to `target`, each given as (block, index in the block)."""


class PagedCache(LayerCache):
    """A layer cache with data for each row, in an array whose axis 1 is the blocks of the cache.

    Without a subclass it is used for data that are written only for committed rows, so that `keep_path` need not move rows.

    Args:
        storage: numpy array or torch tensor. It may have more blocks than the cache.
        rows: copies rows in packed storage; None = storage is not packed, and axis 3 is the index of a row in its block.
    """

    def __init__(self, storage: Any, rows: RowLayout | None = None) -> None:
        self.storage = storage
        self.rows = rows

    @property
    def num_bytes(self) -> int:
        return int(self.storage.nbytes)

    def copy_block(self, source: int, target: int) -> None:
        self.storage[:, target] = self.storage[:, source]

    def copy_row(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Copy one row from `source` to `target`, each given as (block, index in the block)."""
        if self.rows is None:
            self.storage[:, target[0], :, target[1]] = self.storage[:, source[0], :, source[1]]
        else:
            self.rows.copy(self.storage, source, target)

    def fill_block(self, block: int) -> None:
        """Fill a block with small numbers, so that the system has allocated its memory before a pass over it is timed."""
        self.storage[:, block] = 0.01 if self.rows is None else _FILL_BYTE


class FullAttentionCache(PagedCache):
    """Keys and values of layers without a window: an array as `KVGroup.shape` describes it, or packed.

    If a tree has branches, `keep_path` moves the rows of the kept path together.
    """

    def keep_path(self, plan: RowPlan, commit: Commit) -> None:
        size, table = plan.block_size, plan.block_table
        for source, target in commit.moves:
            self.copy_row((table[source // size], source % size), (table[target // size], target % size))
