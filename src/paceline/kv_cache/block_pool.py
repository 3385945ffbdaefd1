"""Which cache blocks are free and how many owners each other one has. Pure bookkeeping: no tensor is touched here."""

from collections import Counter
from collections.abc import Iterable

from paceline.errors import CapacityError

SCRATCH_BLOCK = 0
"""Block that takes writes nobody reads (the repeated lone row at a block border); no sequence ever owns it."""


class BlockPool:
    """Reference-counted blocks 1 … num_blocks - 1; block 0 is the scratch block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise CapacityError(f"a cache needs at least 2 blocks (one is scratch), got {num_blocks}; raise cache_gb")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))  # low ids are handed out first
        self._owners = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def num_owners(self, block: int) -> int:
        """How many block tables hold `block`."""
        return self._owners[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one owner.

        Raises:
            CapacityError: fewer are free; none is taken.
        """
        if count > len(self._free):
            raise CapacityError(
                f"the KV cache is full: {count} blocks wanted, {len(self._free)} of {self.num_blocks - 1} free; "
                "raise cache_gb, or run fewer or shorter sequences at once"
            )
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one owner to each of `blocks`."""
        for block in blocks:
            self._owners[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one owner from each of `blocks`; those without any become free."""
        for block in blocks:
            if self._owners[block] <= 0:
                raise RuntimeError(f"block {block} was released more often than it was taken")
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise RuntimeError unless exactly the blocks of `tables` are taken, each as often as it appears there."""
        wanted = Counter(block for table in tables for block in table)
        if wanted[SCRATCH_BLOCK]:
            raise RuntimeError("a block table owns the scratch block")
        for block in range(1, self.num_blocks):
            if wanted[block] != self._owners[block]:
                raise RuntimeError(f"block {block} has {self._owners[block]} owners but stands in {wanted[block]} block tables")
        if sorted(self._free) != [block for block in range(1, self.num_blocks) if not wanted[block]]:
            raise RuntimeError("the free list does not match the block tables")
