"""The interface of a layer cache: what the layers of one kind keep of every sequence."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from paceline.kv_cache.block_pool import BlockHash
from paceline.kv_cache.row_plan import Commit, RowPlan


class LayerCache(ABC):
    """What the layers of one kind keep: keys and values, a sliding window of them, or a recurrent state.

    `KVCache` assigns rows to blocks and calls these methods; the runtime reads and writes the contents. Data per block are found by block
    id and copied by `copy_block`. Data per sequence are found by `RowPlan.sequence_id`; a cache of that kind needs room for every
    sequence with rows, because the scheduler counts blocks only.
    """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes in use."""

    def copy_block(self, source: int, target: int) -> None:
        """Copy the contents of block `source` to block `target`, which another path or sequence will write to."""

    def reserve(self, plan: RowPlan) -> None:
        """Prepare for the rows of `plan`, which follow the committed rows of its sequence."""

    def keep_path(self, plan: RowPlan, commit: Commit) -> None:
        """Keep the rows in `commit` of a plan that has run, and drop its other rows."""

    def cancel(self, plan: RowPlan) -> None:
        """Drop the rows of `plan`, whether they have run or not. After an interrupt `reserve` may not have been called."""

    def can_truncate(self, sequence_id: int, length: int) -> bool:
        """Return whether a sequence can be truncated to its first `length` committed rows."""
        return True

    def num_resumable(self, block_hashes: Sequence[BlockHash]) -> int:
        """Return the longest prefix, in blocks, that a sequence can resume from. `block_hashes` identify the blocks of its prefix."""
        return len(block_hashes)

    def resume(self, sequence_id: int, length: int, block_hashes: Sequence[BlockHash]) -> None:
        """Continue a sequence after its first `length` rows: it was truncated, or matched a cached prefix.

        Args:
            block_hashes: of its full blocks, as far as they are registered or matched.
        """

    def register_prefix(self, sequence_id: int, first: int, block_hashes: Sequence[BlockHash]) -> None:
        """Make the full blocks of a sequence, from index `first` on, available to other sequences by their hashes."""

    def evict(self, block_hash: BlockHash) -> None:
        """Drop what this layer cache keeps for other sequences under this block hash."""

    def release(self, sequence_id: int) -> None:
        """Free what this layer cache keeps for a sequence."""
