"""Keys and values of all rows, in the blocks of the cache."""

from collections.abc import Sequence
from typing import Any

from paceline.kv_cache.layer_memory import LayerMemory
from paceline.kv_cache.row_plan import Commit, RowPlan


class PagedRows(LayerMemory):
    """Something for every row, in an array whose axis 1 is the cache's blocks; there may be more of them than the cache has.

    Whole blocks are copied, rows are not moved within their blocks: this is for what is written after rows were committed.

    Args:
        storage: whatever a runtime computes with (a numpy array or a torch tensor): only indexing is used here.
    """

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    @property
    def num_bytes(self) -> int:
        return int(self.storage.nbytes)

    def copy_block(self, source: int, target: int) -> None:
        self.storage[:, target] = self.storage[:, source]


class KeyValues(PagedRows):
    """Keys of the i-th layer of a group at 2·i, values at 2·i + 1: [2·layers, num_blocks, K, block_size, D] (`KVGroup.shape`).

    The pass writes them, so the kept rows of a masked tree move to where the committed ones end.
    """

    def keep_path(self, plan: RowPlan, commit: Commit) -> None:
        storage, size = self.storage, plan.block_size
        table: Sequence[int] = plan.paths[0].block_table
        for source, target in commit.moves:
            storage[:, table[target // size], :, target % size] = storage[:, table[source // size], :, source % size]
