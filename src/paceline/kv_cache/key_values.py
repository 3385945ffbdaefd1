"""Keys and values of all rows, in the blocks of the cache."""

from collections.abc import Sequence
from typing import Any, Protocol

from paceline.kv_cache.layer_memory import LayerMemory
from paceline.kv_cache.row_plan import Commit, RowPlan

FILLING = 0x3C
"""A byte that makes small numbers of every type that rows are packed in."""


class RowLayout(Protocol):
    """Where rows lie in storage that a runtime packs."""

    def copy(self, storage: Any, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Copy one row of all layers and heads; both are a block and a row of it."""


class PagedRows(LayerMemory):
    """Something for every row, in an array whose axis 1 is the cache's blocks; there may be more of them than the cache has.

    Whole blocks are copied, rows are not moved within their blocks: this is for what is written after rows were committed.

    Args:
        storage: whatever a runtime computes with (a numpy array or a torch tensor): only indexing is used here.
        rows: where rows lie in it; None = row i of a block at index i of axis 3.
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
        """Copy one row; both are a block and a row of it."""
        if self._rows is None:
            self.storage[:, target[0], :, target[1]] = self.storage[:, source[0], :, source[1]]
        else:
            self._rows.copy(self.storage, source, target)

    def fill_block(self, block: int) -> None:
        """Write small numbers that are no text's."""
        self.storage[:, block] = 0.01 if self._rows is None else FILLING


class KeyValues(PagedRows):
    """Keys of the i-th layer of a group at 2·i, values at 2·i + 1: [2·layers, num_blocks, K, block_size, D] (`KVGroup.shape`),
    or packed.

    The pass writes them, so the kept rows of a masked tree move to where the committed ones end.
    """

    def keep_path(self, plan: RowPlan, commit: Commit) -> None:
        size = plan.block_size
        table: Sequence[int] = plan.paths[0].block_table
        for source, target in commit.moves:
            self.copy_row((table[source // size], source % size), (table[target // size], target % size))
