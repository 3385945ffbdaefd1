"""Keys and values of all rows, stored in the blocks of the cache."""

from typing import Any, Protocol

from paceline.kv_cache.layer_cache import LayerCache
from paceline.kv_cache.row_plan import Commit, RowPlan

_FILL_BYTE = 0x3C  # a byte that forms a small finite number in every type


class RowLayout(Protocol):
    """How a runtime packs rows in its storage."""

    def copy(self, storage: Any, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Copy one row of all layers and heads from `source` to `target`, each (block, row in the block)."""


class PagedCache(LayerCache):
    """Data per row in an array whose axis 1 is the cache's blocks; it may have more blocks than the cache.

    Blocks are copied as a whole, and no row is moved. This class by itself is for data that are written after rows were committed.

    Args:
        storage: numpy array or torch tensor; it is only indexed here.
        rows: layout of rows in packed storage; None = row i of a block has index i on axis 3.
    """

    def __init__(self, storage: Any, rows: RowLayout | None = None) -> None:
        self.storage = storage
        self._rows = rows

    @property
    def num_bytes(self) -> int:
        return int(self.storage.nbytes)

    def copy_block(self, source: int, target: int) -> None:
        self.storage[:, target] = self.storage[:, source]

    def copy_row(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Copy one row from `source` to `target`, each (block, row in the block)."""
        if self._rows is None:
            self.storage[:, target[0], :, target[1]] = self.storage[:, source[0], :, source[1]]
        else:
            self._rows.copy(self.storage, source, target)

    def fill_block(self, block: int) -> None:
        """Fill a block with small numbers, so that a profiling pass reads memory that is really allocated."""
        self.storage[:, block] = 0.01 if self._rows is None else _FILL_BYTE


class FullAttentionCache(PagedCache):
    """Keys of the i-th layer of a group at 2·i, values at 2·i + 1: [2·layers, num_blocks, K, block_size, D] (`KVGroup.shape`), or packed.

    Keeping a path of a masked tree moves its rows to follow the committed ones without gaps.
    """

    def keep_path(self, plan: RowPlan, commit: Commit) -> None:
        size, table = plan.block_size, plan.paths[0].block_table
        for source, target in commit.moves:
            self.copy_row((table[source // size], source % size), (table[target // size], target % size))
