"""Which cache blocks can be had and how many owners each other one has. Pure bookkeeping: no tensor is touched here."""

from collections import Counter
from collections.abc import Iterable

from paceline.errors import CapacityError
from paceline.kv_cache.prefix_index import PrefixIndex


class BlockPool:
    """Reference-counted blocks 0 … num_blocks - 1.

    A block without owners is free, or idle while the index knows what it holds: it can be shared again, and is
    evicted when nothing else is free.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        if num_blocks < 1:
            raise CapacityError(f"a cache needs at least 1 block, got {num_blocks}; raise kv_cache_gb")
        self.num_blocks = num_blocks
        self._index = index
        self._free = list(reversed(range(num_blocks)))  # low ids are handed out first
        self._owners = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, idle ones included."""
        return len(self._free) + self._index.num_idle

    def num_owners(self, block: int) -> int:
        """How many block tables hold `block`."""
        return self._owners[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one owner: free ones, then idle ones, least recently used first.

        Raises:
            CapacityError: fewer can be had; none is taken or evicted.
        """
        if count > self.num_free:
            raise CapacityError(
                f"the KV cache is full: {count} blocks wanted, {self.num_free} of {self.num_blocks} free; "
                "raise kv_cache_gb, or run fewer or shorter sequences at once"
            )
        blocks = [self._free.pop() if self._free else self._index.evict() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one owner to each of `blocks`, all owned or idle."""
        for block in blocks:
            if self._owners[block] == 0 and not self._index.revive(block):
                raise RuntimeError(f"block {block} is free: nobody can share it")
            self._owners[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one owner from each of `blocks`; those without any become free, or idle if the index knows them."""
        for block in blocks:
            if self._owners[block] <= 0:
                raise RuntimeError(f"block {block} was released more often than it was taken")
            self._owners[block] -= 1
            if self._owners[block] == 0 and not self._index.retire(block):
                self._free.append(block)

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise RuntimeError unless the blocks of `tables` are owned, each as often as it appears there, and all others can be had."""
        wanted = Counter(block for table in tables for block in table)
        for block in range(self.num_blocks):
            if wanted[block] != self._owners[block]:
                raise RuntimeError(f"block {block} has {self._owners[block]} owners but stands in {wanted[block]} block tables")
        unowned = [block for block in range(self.num_blocks) if not wanted[block]]
        self._index.check(block for block in unowned if self._index.link_of(block) is not None)
        if sorted(self._free) != [block for block in unowned if self._index.link_of(block) is None]:
            raise RuntimeError("the free list does not match the block tables")
