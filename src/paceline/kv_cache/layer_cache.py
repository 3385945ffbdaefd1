"""The interface of a layer cache, which stores what the layers of one kind need about earlier rows of each sequence."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from paceline.kv_cache.block_pool import BlockHash
from paceline.kv_cache.row_plan import CommittedPath, RowPlan


class LayerCache(ABC):
    """Stores keys and values of all rows, keys and values of a sliding window, or recurrent states.

    `KVCache` assigns rows to blocks and calls these methods; the runtime reads and writes the data. A subclass stores data by block, which
    `copy_block` copies, or by sequence (`RowPlan.sequence_id`). In the latter case it must have room for every sequence that has rows,
    because the scheduler counts only blocks.
    """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size in bytes."""

    def copy_block(self, source: int, target: int) -> None:
        """Copy block `source` to block `target`, because `source` has several owners and one of them will write to it."""

    def reserve_rows(self, plan: RowPlan) -> None:
        """Allocate memory for the rows of `plan`, which follow the committed rows of the sequence."""

    def keep_path(self, plan: RowPlan, path: CommittedPath) -> None:
        """After a pass, commit the rows of `plan` that are on `path`, and drop the others."""

    def drop_reserved_rows(self, plan: RowPlan) -> None:
        """Drop all rows of `plan`, before or after its pass. `reserve_rows` may not have been called, if an interrupt prevented it."""

    def can_truncate(self, sequence_id: int, length: int) -> bool:
        """Return whether a sequence can be truncated to its first `length` committed rows."""
        return True

    def num_resumable_blocks(self, block_hashes: Sequence[BlockHash]) -> int:
        """Return the length in blocks of the longest prefix of `block_hashes` that a sequence can resume from."""
        return len(block_hashes)

    def resume(self, sequence_id: int, length: int, block_hashes: Sequence[BlockHash]) -> None:
        """Make a sequence continue after its first `length` rows, because it was truncated or has matched a cached prefix.

        Args:
            block_hashes: see `CachedSequence.block_hashes`.
        """

    def register_prefix(self, sequence_id: int, first_index: int, block_hashes: Sequence[BlockHash]) -> None:
        """Let other sequences resume after the full blocks from `first_index` on, which have these hashes."""

    def evict(self, block_hash: BlockHash) -> None:
        """Drop the data that other sequences could find by this block hash."""

    def release_sequence(self, sequence_id: int) -> None:
        """Free the data of a sequence."""
