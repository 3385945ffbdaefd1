"""The cache of one network. It assigns the rows of sequences to blocks; its layer caches store the contents of the rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import CapacityError
from paceline.kv_cache.block_pool import BlockHash, BlockPool, PrefixStats
from paceline.kv_cache.layer_cache import LayerCache
from paceline.kv_cache.row_plan import RowPlan, blocks_for, plan_rows

BLOCK_SIZE = 32  # rows per block


@dataclass(slots=True, eq=False)
class CachedSequence:
    """The blocks and rows of one sequence.

    Attributes:
        block_table: the sequence's blocks, in order.
        committed_len: number of committed rows. Later rows belong to the current pass.
        plan: the rows of the current pass; None = no pass is reserved.
        block_hashes: hashes of the first blocks, as far as they were registered or matched. These blocks are full.
        num_queried: number of tokens that `match_prefix` looked up.
        salt: only sequences with the same salt share blocks.
        id: number of the sequence in its cache; 0 = it belongs to no cache.
    """

    salt: bytes = b""
    id: int = 0
    block_table: list[int] = field(default_factory=list)
    committed_len: int = 0
    plan: RowPlan | None = None
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_queried: int = 0


class KVCache:
    """The blocks and layer caches of one network.

    After a sequence is released, other sequences with the same prefix can reuse its registered blocks until these are evicted.

    Args:
        layer_caches: one for each kind of layer that stores data about earlier rows, such as keys and values.
        num_blocks: number of blocks that the layer caches have room for.
        prefix_caching: whether sequences reuse blocks of the same prefix.
    """

    def __init__(
        self,
        layer_caches: Sequence[LayerCache],
        num_blocks: int,
        *,
        block_size: int = BLOCK_SIZE,
        prefix_caching: bool = True,
    ) -> None:
        all_caches = self.layer_caches = list(layer_caches)

        def evict(block_hash: BlockHash) -> None:  # not a method: `self` would be in a reference cycle, which delays freeing the cache
            for layer_cache in all_caches:
                layer_cache.evict(block_hash)

        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks, block_size, evict)
        self._sequences: dict[int, CachedSequence] = {}
        self._last_id = 0

    @property
    def max_slots(self) -> int:
        """Number of rows that the cache has room for."""
        return self.pool.num_blocks * self.block_size

    @property
    def stats(self) -> PrefixStats:
        """Counters of the prefix cache."""
        return self.pool.stats

    @property
    def num_bytes(self) -> int:
        """Size of all layer caches in bytes."""
        return sum(layer_cache.num_bytes for layer_cache in self.layer_caches)

    @property
    def bytes_per_token(self) -> int:
        """Size of a row in bytes."""
        return self.num_bytes // max(1, self.max_slots)

    def add_layer_cache(self, layer_cache: LayerCache) -> None:
        """Add a layer cache, such as that of a drafting head. Later calls then apply to it as well."""
        self.layer_caches.append(layer_cache)

    def new_sequence(self, salt: bytes = b"") -> CachedSequence:
        """Return a new empty sequence. Only sequences with the same salt share blocks."""
        self._last_id += 1
        sequence = self._sequences[self._last_id] = CachedSequence(salt, self._last_id)
        return sequence

    def num_blocks_needed(self, sequence: CachedSequence, parents: Sequence[int]) -> int:
        """Return the number of blocks that `reserve` would allocate for a tree."""
        return blocks_for(sequence.committed_len + len(parents), self.block_size) - len(sequence.block_table)

    def reserve(self, sequence: CachedSequence, parents: Sequence[int], num_prefill: int = 1, *, pinned_len: int | None = None) -> RowPlan:
        """Allocate the blocks of a pass over a draft tree, and return how the tree's nodes become rows.

        Args:
            parents: parent of each node, parents[0] = -1. A prompt chunk is a chain.
            num_prefill: number of first nodes that are not drafted. They are a chain, which is kept or dropped as a whole.
            pinned_len: number of first committed rows that will not be truncated later; None = all of them.

        Raises:
            CapacityError: too few blocks are free; nothing was changed.
        """
        if sequence.plan is not None:
            raise RuntimeError("a pass is under way for this sequence: keep a path or cancel it first")
        length, table = sequence.committed_len, sequence.block_table
        num_blocks_needed = self.num_blocks_needed(sequence, parents)
        fresh = self.pool.allocate(num_blocks_needed) if num_blocks_needed > 0 else ()
        plan = sequence.plan = plan_rows(parents, length, table, fresh, self.block_size, sequence.id, num_prefill, pinned_len)
        for layer_cache in self.layer_caches:
            try:
                layer_cache.reserve(plan)
            except CapacityError:
                self.cancel(sequence)
                raise
        return plan

    def keep_path(self, sequence: CachedSequence, node: int) -> None:
        """Commit the rows of the path from the root to `node` of the reserved tree, and free the other rows of the pass."""
        if (plan := sequence.plan) is None:
            raise RuntimeError("no pass is under way for this sequence: reserve first")
        commit = plan.commit(node)
        for layer_cache in self.layer_caches:
            layer_cache.keep_path(plan, commit)
        if plan.fresh_blocks:
            self.pool.release(plan.block_table[len(commit.block_table) :])
        sequence.block_table = list(commit.block_table)
        sequence.committed_len = commit.committed_len
        sequence.plan = None

    def cancel(self, sequence: CachedSequence) -> None:
        """Free the rows of the reserved pass; committed rows are kept."""
        plan = sequence.plan
        if plan is not None:
            for layer_cache in self.layer_caches:
                layer_cache.cancel(plan)
            self.pool.release(plan.fresh_blocks)
            sequence.plan = None

    def truncate(self, sequence: CachedSequence, length: int) -> int:
        """Keep the first `length` committed rows, or fewer if a layer cache cannot resume there; return the number of rows kept.

        If the last block is then partly filled, it will be written to. It is therefore copied if it has other owners, else removed from the
        prefix index.

        Raises:
            CapacityError: no block is free for the copy; nothing was changed.
        """
        if not 0 <= length <= sequence.committed_len:
            raise ValueError(f"cannot truncate {sequence.committed_len} committed rows to {length}")
        if not all(layer_cache.can_truncate(sequence.id, length) for layer_cache in self.layer_caches):
            length = self._num_resumable_blocks(sequence.block_hashes[: length // self.block_size]) * self.block_size
        keep, table = blocks_for(length, self.block_size), sequence.block_table
        has_tail = length % self.block_size > 0
        shares_tail = has_tail and self.pool.num_owners(table[keep - 1]) > 1
        own = self.pool.allocate(int(shares_tail))
        self.cancel(sequence)
        if shares_tail:
            for layer_cache in self.layer_caches:
                layer_cache.copy_block(table[keep - 1], own[0])
            keep -= 1
        elif has_tail:
            self.pool.unregister(table[keep - 1])
        self._free_blocks(sequence, keep)
        table.extend(own)
        del sequence.block_hashes[length // self.block_size :]
        self._resume(sequence, length)
        return length

    def match_prefix(self, sequence: CachedSequence, token_ids: Sequence[int]) -> int:
        """Give an empty sequence the longest cached prefix of `token_ids`, without the last token, whose logits must be computed.

        Returns:
            the number of rows in the prefix, a multiple of the block size.
        """
        if sequence.committed_len or sequence.plan is not None:
            raise RuntimeError("only an empty sequence can match a prefix")
        if not self.prefix_caching:
            return 0
        found = self._find_prefix(sequence, token_ids)
        blocks = [block for _, block in found]
        sequence.block_hashes.extend(block_hash for block_hash, _ in found)
        self.pool.share(blocks)
        sequence.block_table = blocks
        self._resume(sequence, len(blocks) * self.block_size)
        sequence.num_queried = len(token_ids)
        self.stats.queried_tokens += len(token_ids)
        self.stats.hit_tokens += sequence.committed_len
        return sequence.committed_len

    def cached_prefix_len(self, sequence: CachedSequence, token_ids: Sequence[int]) -> int:
        """Return how many rows `match_prefix` would find now, without changing anything."""
        return len(self._find_prefix(sequence, token_ids)) * self.block_size if self.prefix_caching else 0

    def release_prefix(self, sequence: CachedSequence) -> None:
        """Undo `match_prefix`, including its statistics. No pass may have been reserved since."""
        self.stats.queried_tokens -= sequence.num_queried
        self.stats.hit_tokens -= sequence.committed_len
        self._free_blocks(sequence, 0)
        sequence.committed_len = sequence.num_queried = 0
        for layer_cache in self.layer_caches:
            layer_cache.release(sequence.id)

    def register_prefix(self, sequence: CachedSequence, token_ids: Sequence[int]) -> None:
        """Add the blocks of a sequence that became full since the last call to the prefix index.

        Args:
            token_ids: the tokens of the sequence. Those after the committed rows are ignored.
        """
        first, full = len(sequence.block_hashes), sequence.committed_len // self.block_size
        if first == full or not self.prefix_caching:
            return
        found = self.pool.block_hashes(token_ids, sequence.salt, sequence.block_hashes, full)
        for block_hash, block in zip(found, sequence.block_table[first:full], strict=True):
            self.pool.register(block_hash, block)
            sequence.block_hashes.append(block_hash)
        for layer_cache in self.layer_caches:
            layer_cache.register_prefix(sequence.id, first, sequence.block_hashes[first:])

    def evict(self, sequence: CachedSequence) -> None:
        """Remove a sequence's blocks from the prefix index, because a failed pass may have damaged them."""
        for block in sequence.block_table:
            self.pool.unregister(block)
        for block_hash in sequence.block_hashes:
            for layer_cache in self.layer_caches:
                layer_cache.evict(block_hash)
        sequence.block_hashes.clear()

    def release(self, sequence: CachedSequence) -> None:
        """Free a sequence, which must not be used again. Its registered blocks can be reused until they are evicted."""
        if self._sequences.get(sequence.id) is not sequence:  # already released: its blocks may have new owners
            raise RuntimeError("the sequence was released before, or is another cache's")
        del self._sequences[sequence.id]
        self.cancel(sequence)
        self._free_blocks(sequence, 0)
        for layer_cache in self.layer_caches:
            layer_cache.release(sequence.id)

    def check(self) -> None:
        """Raise RuntimeError unless block tables match the pool and no indexed block will be written to."""
        tables: list[Sequence[int]] = []
        for sequence in self._sequences.values():
            if len(sequence.block_table) != blocks_for(sequence.committed_len, self.block_size):
                raise RuntimeError(f"{sequence.committed_len} committed rows are in {len(sequence.block_table)} blocks")
            tables.append(sequence.block_table)
            if sequence.plan is not None:
                tables.append(sequence.plan.fresh_blocks)
            self._check_indexed_blocks(sequence)
        self.pool.check(tables)

    def _check_indexed_blocks(self, sequence: CachedSequence) -> None:
        full = sequence.committed_len // self.block_size
        if len(sequence.block_hashes) > full:
            raise RuntimeError(f"there are {len(sequence.block_hashes)} hashes for {full} full blocks")
        written = [*sequence.block_table[full:], *(sequence.plan.fresh_blocks if sequence.plan is not None else ())]
        if any(self.pool.hash_of(block) is not None for block in written):
            raise RuntimeError("the prefix index contains a block that is being written")
        for block_hash, block in zip(sequence.block_hashes, sequence.block_table, strict=False):
            if self.pool.hash_of(block) not in {None, block_hash}:
                raise RuntimeError(f"block {block} is indexed with a hash of other rows")

    def _find_prefix(self, sequence: CachedSequence, token_ids: Sequence[int]) -> list[tuple[BlockHash, int]]:
        """Return the longest indexed prefix of `token_ids`, without the last token, that all layer caches can resume from."""
        found: list[tuple[BlockHash, int]] = []
        for block_hash in self.pool.block_hashes(token_ids, sequence.salt, (), (len(token_ids) - 1) // self.block_size):
            block = self.pool.find_block(block_hash)
            if block is None:
                break
            found.append((block_hash, block))
        return found[: self._num_resumable_blocks([block_hash for block_hash, _ in found])]

    def _num_resumable_blocks(self, block_hashes: Sequence[BlockHash]) -> int:
        """Return the length in blocks of the longest prefix that every layer cache can resume from."""
        while True:
            count = min((layer_cache.num_resumable_blocks(block_hashes) for layer_cache in self.layer_caches), default=len(block_hashes))
            if count == len(block_hashes):
                return count
            block_hashes = block_hashes[:count]

    def _resume(self, sequence: CachedSequence, length: int) -> None:
        sequence.committed_len = length
        for layer_cache in self.layer_caches:
            layer_cache.resume(sequence.id, length, sequence.block_hashes)

    def _free_blocks(self, sequence: CachedSequence, first: int) -> None:
        """Release the blocks from index `first` on, the last one first, so that the end of a sequence is evicted before its beginning.

        If the index has another block for the same prefix, that one is marked as recently used; if it has none, this block is added to it.
        """
        table, block_hashes = sequence.block_table, sequence.block_hashes
        self.pool.release(reversed(table[max(first, len(block_hashes)) :]))
        for block_hash, block in zip(reversed(block_hashes[first:]), reversed(table[first : len(block_hashes)]), strict=True):
            self.pool.register(block_hash, block)
            self.pool.release((block,))
            self.pool.touch(block_hash)
        del table[first:], block_hashes[first:]
