"""Allocates the blocks of a cache, counts their owners, and indexes full blocks by prefix, to reuse them. Stores no tensors.

A full block is identified by a hash of all tokens up to its end, so one hash stands for a whole prefix:

    hash of block 0 = H(H(secret, salt), tokens of block 0)      hash of block i = H(hash of block i - 1, tokens of block i)

`secret` is random, and new for every cache. A lookup also compares the block's own tokens. It can return a wrong block only if two
128-bit hashes collide; with a million blocks the probability is 10^-27.
"""

import secrets
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from paceline.errors import CapacityError

HASH_BYTES = 16


@dataclass(slots=True)
class PrefixStats:
    """Counters of the prefix cache.

    Attributes:
        num_looked_up_tokens: tokens that were looked up in the prefix index.
        num_hit_tokens: looked-up tokens whose keys and values were cached.
        num_evicted_blocks: indexed blocks that were evicted because their memory was needed.
    """

    num_looked_up_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted_blocks: int = 0


class BlockHash(NamedTuple):
    """Identifies a full block: the hash of all tokens up to its end, and its own token ids as bytes."""

    digest: bytes
    token_id_bytes: bytes


class BlockPool:
    """Reference-counted blocks 0 … num_blocks - 1. Full blocks can be indexed by their block hash.

    The owners of a block are the block tables that contain it. A block without owners is free. A free block that is indexed is *idle*:
    its rows can still be reused. If all free blocks are idle, the least recently used one is evicted. The rows of an indexed block
    must not be changed; `unregister` it first.

    Args:
        block_size: tokens per block.
        on_evict: called with each block hash that is removed from the index.
    """

    def __init__(self, num_blocks: int, block_size: int, on_evict: Callable[[BlockHash], None] = lambda _: None) -> None:
        if num_blocks < 1:
            raise CapacityError(f"a cache needs at least 1 block, got {num_blocks}; raise kv_cache_gb")
        self.num_blocks, self.prefix_stats = num_blocks, PrefixStats()
        self._block_size, self._on_evict = block_size, on_evict
        self._secret = secrets.token_bytes(HASH_BYTES)
        self._free = list(reversed(range(num_blocks)))  # low ids are allocated first
        self._owners = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Number of blocks without owners, idle ones included. All of them can be allocated."""
        return len(self._free) + len(self._idle)

    def num_owners(self, block: int) -> int:
        """Return the number of block tables that contain `block`."""
        return self._owners[block]

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one owner each. Idle blocks are allocated last, starting with the least recently used one.

        Raises:
            CapacityError: fewer than `count` blocks are free; nothing was changed.
        """
        if count > self.num_free:
            raise CapacityError(
                f"the KV cache is full: {count} blocks needed, {self.num_free} of {self.num_blocks} free; "
                "raise kv_cache_gb, or run fewer or shorter sequences at once"
            )
        blocks = []
        for _ in range(count):
            if not self._free:
                self.unregister(next(iter(self._idle)))
                self.prefix_stats.num_evicted_blocks += 1
            block = self._free.pop()
            self._owners[block] = 1
            blocks.append(block)
        return blocks

    def add_owner(self, blocks: Iterable[int]) -> None:
        """Add one owner to each of `blocks`. All of them must have an owner or be idle."""
        for block in blocks:
            if self._owners[block] == 0:
                if block not in self._idle:
                    raise RuntimeError(f"block {block} is free and cannot be shared")
                del self._idle[block]
            self._owners[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one owner from each of `blocks`. Blocks without owners become free."""
        for block in blocks:
            if self._owners[block] <= 0:
                raise RuntimeError(f"block {block} was released more often than it was allocated or shared")
            self._owners[block] -= 1
            if self._owners[block] == 0:
                if block in self._hash_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def block_hashes(self, token_ids: Sequence[int], salt: bytes, previous: Sequence[BlockHash], num_blocks: int) -> Iterator[BlockHash]:
        """Yield the hashes of blocks len(previous) … num_blocks - 1 of a sequence, given the `previous` ones."""
        size = self._block_size
        digest = previous[-1].digest if previous else blake2b(self._secret + salt, digest_size=HASH_BYTES).digest()
        for start in range(len(previous) * size, num_blocks * size, size):
            token_id_bytes = array("I", token_ids[start : start + size]).tobytes()
            digest = blake2b(digest + token_id_bytes, digest_size=HASH_BYTES).digest()
            yield BlockHash(digest, token_id_bytes)

    def find_block(self, block_hash: BlockHash) -> int | None:
        """Return the indexed block with this hash; None if there is none."""
        block = self._block_of.get(block_hash.digest)
        return block if block is not None and self._hash_of[block].token_id_bytes == block_hash.token_id_bytes else None

    def hash_of(self, block: int) -> BlockHash | None:
        """Return the hash of `block`; None if it is not indexed."""
        return self._hash_of.get(block)

    def register(self, block_hash: BlockHash, block: int) -> None:
        """Add a block to the index, unless the index already contains the block or its hash."""
        if block_hash.digest not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash.digest] = block
            self._hash_of[block] = block_hash

    def unregister(self, block: int) -> None:
        """Remove `block` from the index, if it is there. A block that no sequence owns stays free."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash.digest]
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)
            self._on_evict(block_hash)

    def touch(self, block_hash: BlockHash) -> None:
        """If the block with this hash is idle, make it the most recently used one, so that it is evicted last."""
        block = self._block_of.get(block_hash.digest)
        if block is not None and block in self._idle:
            self._idle.move_to_end(block)

    def check_consistency(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise RuntimeError unless the owners, the index and the free list match the block tables."""
        expected = Counter(block for table in tables for block in table)
        for block in range(self.num_blocks):
            if expected[block] != self._owners[block]:
                raise RuntimeError(f"block {block} has {self._owners[block]} owners but is in {expected[block]} block tables")
        if {block_hash.digest: block for block, block_hash in self._hash_of.items()} != self._block_of:
            raise RuntimeError("the hashes and the blocks of the prefix index do not match")
        unowned = {block for block in range(self.num_blocks) if not expected[block]}
        if (idle := unowned & self._hash_of.keys()) != self._idle.keys():
            raise RuntimeError(f"blocks {sorted(self._idle.keys() ^ idle)} are idle or indexed without owners, not both")
        if sorted(self._free) != sorted(unowned - idle):
            raise RuntimeError("the free list does not match the block tables")
