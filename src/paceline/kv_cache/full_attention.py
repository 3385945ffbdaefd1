"""Layer caches that store keys and values of all rows in the blocks of the cache (paged attention)."""

from collections.abc import Callable
from typing import Any

from paceline.kv_cache.layer_cache import LayerCache
from paceline.kv_cache.row_plan import CommittedPath, RowPlan

_FILL_BYTE = 0x3C  # a number made of these bytes is small and finite in every packed type

Slot = tuple[int, int]
"""A row of the cache: its block, and its index in the block."""
CopyPackedRow = Callable[[Any, Slot, Slot], None]


class PagedCache(LayerCache):
    """A layer cache that stores data of each row in an array whose axis 1 is the block.

    It suffices for data that are written for committed rows only, because its `keep_path` moves no rows.

    Args:
        storage: numpy array or torch tensor. It may have more blocks than the cache.
        copy_packed_row: function of (storage, source slot, target slot) that copies a row if the runtime packs rows in a layout of its
            own; None = storage is not packed, and axis 3 is the index of a row in its block.
    """

    def __init__(self, storage: Any, copy_packed_row: CopyPackedRow | None = None) -> None:
        self.storage, self.copy_packed_row = storage, copy_packed_row

    @property
    def num_bytes(self) -> int:
        return int(self.storage.nbytes)

    def copy_block(self, source: int, target: int) -> None:
        self.storage[:, target] = self.storage[:, source]

    def copy_row(self, source: Slot, target: Slot) -> None:
        if self.copy_packed_row is None:
            self.storage[:, target[0], :, target[1]] = self.storage[:, source[0], :, source[1]]
        else:
            self.copy_packed_row(self.storage, source, target)

    def fill_block(self, block: int) -> None:
        """Fill a block with small numbers, so that its memory pages exist before a pass that reads them is timed."""
        self.storage[:, block] = 0.01 if self.copy_packed_row is None else _FILL_BYTE


class FullAttentionCache(PagedCache):
    """Keys and values of layers without a window: an array as `KVGroup.shape` describes it, or packed."""

    def keep_path(self, plan: RowPlan, path: CommittedPath) -> None:
        size, table = plan.block_size, plan.block_table
        for source, target in path.moves:
            self.copy_row((table[source // size], source % size), (table[target // size], target % size))
