"""The KV cache of one network. It assigns the rows of sequences to blocks; its layer caches store keys, values or states."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import CapacityError
from paceline.kv_cache.block_pool import BlockHash, BlockPool, PrefixStats
from paceline.kv_cache.layer_cache import LayerCache
from paceline.kv_cache.row_plan import RowPlan, num_blocks_for, plan_rows

BLOCK_SIZE = 32  # rows per block


@dataclass(slots=True, eq=False)
class CachedSequence:
    """The blocks and rows of one sequence.

    Attributes:
        block_table: the sequence's blocks, in order.
        committed_len: number of committed rows. Later rows belong to the current pass.
        row_plan: the rows of the current pass; None = no rows are reserved.
        block_hashes: hashes of the full blocks that `match_prefix` matched or `register_prefix` indexed.
        num_looked_up_tokens: number of tokens that `match_prefix` looked up, which is 0 without prefix caching.
        salt: only sequences with the same salt share blocks.
        id: unique in its cache; 0 = the sequence belongs to no cache.
    """

    salt: bytes = b""
    id: int = 0
    block_table: list[int] = field(default_factory=list)
    committed_len: int = 0
    row_plan: RowPlan | None = None
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_looked_up_tokens: int = 0


class KVCache:
    """The blocks and layer caches of one network.

    After a sequence is released, other sequences with the same prefix can reuse its registered blocks until these are evicted.

    Args:
        layer_caches: one for each kind of layer that stores data about earlier rows, such as keys and values.
        num_blocks: number of blocks that the layer caches have room for.
        prefix_caching: whether sequences reuse blocks of the same prefix.
    """

    def __init__(
        self, layer_caches: Sequence[LayerCache], num_blocks: int, *, block_size: int = BLOCK_SIZE, prefix_caching: bool = True
    ) -> None:
        all_caches = self.layer_caches = list(layer_caches)

        def evict(block_hash: BlockHash) -> None:  # not a method, because a reference cycle would delay freeing the cache
            for layer_cache in all_caches:
                layer_cache.evict(block_hash)

        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks, block_size, evict)
        self._sequences: dict[int, CachedSequence] = {}
        self._last_id = 0

    @property
    def max_slots(self) -> int:
        """Capacity in rows."""
        return self.pool.num_blocks * self.block_size

    @property
    def prefix_stats(self) -> PrefixStats:
        """Counters of the prefix cache."""
        return self.pool.prefix_stats

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
        """Return the number of blocks that `reserve_rows` would allocate for a draft tree."""
        return num_blocks_for(sequence.committed_len + len(parents), self.block_size) - len(sequence.block_table)

    def reserve_rows(
        self, sequence: CachedSequence, parents: Sequence[int], num_prefill_rows: int = 1, *, pinned_len: int | None = None
    ) -> RowPlan:
        """Allocate the blocks of a pass over a draft tree, and assign a row to each node.

        Args:
            parents: parent of each node, parents[0] = -1. A prompt chunk is a chain.
            num_prefill_rows: how many nodes, from the root on, are not drafted. They are a chain, and kept or dropped together.
            pinned_len: `truncate` will never be called with fewer rows than this; None = never with fewer than the committed rows.

        Raises:
            CapacityError: too few blocks are free; nothing was changed.
        """
        if sequence.row_plan is not None:
            raise RuntimeError("a pass is under way for this sequence: call keep_path or drop_reserved_rows first")
        length, table = sequence.committed_len, sequence.block_table
        num_blocks_needed = self.num_blocks_needed(sequence, parents)
        fresh = self.pool.allocate(num_blocks_needed) if num_blocks_needed > 0 else ()
        plan = sequence.row_plan = plan_rows(parents, length, table, fresh, self.block_size, sequence.id, num_prefill_rows, pinned_len)
        for layer_cache in self.layer_caches:
            try:
                layer_cache.reserve_rows(plan)
            except CapacityError:
                self.drop_reserved_rows(sequence)
                raise
        return plan

    def keep_path(self, sequence: CachedSequence, node: int) -> None:
        """Commit the rows of the path from the root to `node` of the reserved tree, and free the other rows of the pass."""
        if (plan := sequence.row_plan) is None:
            raise RuntimeError("no pass is under way for this sequence: call reserve_rows first")
        path = plan.committed_path(node)
        for layer_cache in self.layer_caches:
            layer_cache.keep_path(plan, path)
        if plan.fresh_blocks:
            self.pool.release(plan.block_table[len(path.block_table) :])
        sequence.block_table = list(path.block_table)
        sequence.committed_len = path.committed_len
        sequence.row_plan = None

    def drop_reserved_rows(self, sequence: CachedSequence) -> None:
        """Undo `reserve_rows`, before or after the pass; committed rows are kept."""
        plan = sequence.row_plan
        if plan is not None:
            for layer_cache in self.layer_caches:
                layer_cache.drop_reserved_rows(plan)
            self.pool.release(plan.fresh_blocks)
            sequence.row_plan = None

    def truncate(self, sequence: CachedSequence, length: int) -> int:
        """Keep the first `length` committed rows, or fewer if a layer cache cannot resume there; return the number of rows kept.

        A last block that is then partly filled will be written to. If it has other owners, it is therefore copied, else it is removed from
        the prefix index.

        Raises:
            CapacityError: no block is free for the copy; nothing was changed.
        """
        if not 0 <= length <= sequence.committed_len:
            raise ValueError(f"cannot truncate {sequence.committed_len} committed rows to {length}")
        if not all(layer_cache.can_truncate(sequence.id, length) for layer_cache in self.layer_caches):
            length = self._num_resumable_blocks(sequence.block_hashes[: length // self.block_size]) * self.block_size
        keep, table = num_blocks_for(length, self.block_size), sequence.block_table
        has_tail = length % self.block_size > 0
        shares_tail = has_tail and self.pool.num_owners(table[keep - 1]) > 1
        own = self.pool.allocate(int(shares_tail))
        self.drop_reserved_rows(sequence)
        if shares_tail:
            for layer_cache in self.layer_caches:
                layer_cache.copy_block(table[keep - 1], own[0])
            keep -= 1
        elif has_tail:
            self.pool.unregister(table[keep - 1])
        self._free_blocks(sequence, keep)
        table.extend(own)
        del sequence.block_hashes[length // self.block_size :]
        self._resume_layer_caches(sequence, length)
        return length

    def match_prefix(self, sequence: CachedSequence, token_ids: Sequence[int]) -> int:
        """Start an empty sequence with the longest cached prefix of `token_ids`. The last token is left out: its logits are needed.

        Returns:
            the number of rows in the prefix, a multiple of the block size.
        """
        if sequence.committed_len or sequence.row_plan is not None:
            raise RuntimeError("only an empty sequence can match a prefix")
        if not self.prefix_caching:
            return 0
        matched = self._find_prefix(sequence, token_ids)
        blocks = [block for _, block in matched]
        sequence.block_hashes.extend(block_hash for block_hash, _ in matched)
        self.pool.add_owner(blocks)
        sequence.block_table = blocks
        self._resume_layer_caches(sequence, len(blocks) * self.block_size)
        sequence.num_looked_up_tokens = len(token_ids)
        self.prefix_stats.num_looked_up_tokens += len(token_ids)
        self.prefix_stats.num_hit_tokens += sequence.committed_len
        return sequence.committed_len

    def cached_prefix_len(self, sequence: CachedSequence, token_ids: Sequence[int]) -> int:
        """Return how many rows `match_prefix` would reuse now."""
        return len(self._find_prefix(sequence, token_ids)) * self.block_size if self.prefix_caching else 0

    def release_prefix(self, sequence: CachedSequence) -> None:
        """Undo `match_prefix` and what it added to `prefix_stats`. Must not be called after rows were reserved."""
        self.prefix_stats.num_looked_up_tokens -= sequence.num_looked_up_tokens
        self.prefix_stats.num_hit_tokens -= sequence.committed_len
        self._free_blocks(sequence, 0)
        sequence.committed_len = sequence.num_looked_up_tokens = 0
        for layer_cache in self.layer_caches:
            layer_cache.release_sequence(sequence.id)

    def register_prefix(self, sequence: CachedSequence, token_ids: Sequence[int]) -> None:
        """Index the blocks of a sequence that have become full, so that other sequences can reuse them.

        Args:
            token_ids: the tokens of the sequence. Those after the committed rows are ignored.
        """
        first, full = len(sequence.block_hashes), sequence.committed_len // self.block_size
        if first == full or not self.prefix_caching:
            return
        new_hashes = self.pool.block_hashes(token_ids, sequence.salt, sequence.block_hashes, full)
        for block_hash, block in zip(new_hashes, sequence.block_table[first:full], strict=True):
            self.pool.register(block_hash, block)
            sequence.block_hashes.append(block_hash)
        for layer_cache in self.layer_caches:
            layer_cache.register_prefix(sequence.id, first, sequence.block_hashes[first:])

    def unregister_prefix(self, sequence: CachedSequence) -> None:
        """Remove a sequence's blocks from the prefix index. Needed after a failed pass, which may have damaged them."""
        for block in sequence.block_table:
            self.pool.unregister(block)
        for block_hash in sequence.block_hashes:
            for layer_cache in self.layer_caches:
                layer_cache.evict(block_hash)
        sequence.block_hashes.clear()

    def release_sequence(self, sequence: CachedSequence) -> None:
        """Free a sequence, which must not be used again. Its registered blocks can be reused until they are evicted."""
        if self._sequences.get(sequence.id) is not sequence:  # releasing it twice would take its blocks from their new owners
            raise RuntimeError("the sequence was released before, or is another cache's")
        del self._sequences[sequence.id]
        self.drop_reserved_rows(sequence)
        self._free_blocks(sequence, 0)
        for layer_cache in self.layer_caches:
            layer_cache.release_sequence(sequence.id)

    def check_consistency(self) -> None:
        """Raise RuntimeError unless block tables match the pool and no block that will be written to is indexed."""
        block_tables: list[Sequence[int]] = []
        for sequence in self._sequences.values():
            if len(sequence.block_table) != num_blocks_for(sequence.committed_len, self.block_size):
                raise RuntimeError(f"{sequence.committed_len} committed rows are in {len(sequence.block_table)} blocks")
            block_tables.append(sequence.block_table)
            if sequence.row_plan is not None:
                block_tables.append(sequence.row_plan.fresh_blocks)
            self._check_indexed_blocks(sequence)
        self.pool.check_consistency(block_tables)

    def _check_indexed_blocks(self, sequence: CachedSequence) -> None:
        full = sequence.committed_len // self.block_size
        if len(sequence.block_hashes) > full:
            raise RuntimeError(f"there are {len(sequence.block_hashes)} hashes for {full} full blocks")
        written = [*sequence.block_table[full:], *(sequence.row_plan.fresh_blocks if sequence.row_plan is not None else ())]
        if any(self.pool.hash_of(block) is not None for block in written):
            raise RuntimeError("the prefix index contains a block that is being written")
        for block_hash, block in zip(sequence.block_hashes, sequence.block_table, strict=False):
            if self.pool.hash_of(block) not in {None, block_hash}:
                raise RuntimeError(f"block {block} is indexed with a hash of other rows")

    def _find_prefix(self, sequence: CachedSequence, token_ids: Sequence[int]) -> list[tuple[BlockHash, int]]:
        """Return the longest indexed prefix that all layer caches can resume from, excluding the last token."""
        matched: list[tuple[BlockHash, int]] = []
        for block_hash in self.pool.block_hashes(token_ids, sequence.salt, (), (len(token_ids) - 1) // self.block_size):
            block = self.pool.find_block(block_hash)
            if block is None:
                break
            matched.append((block_hash, block))
        return matched[: self._num_resumable_blocks([block_hash for block_hash, _ in matched])]

    def _num_resumable_blocks(self, block_hashes: Sequence[BlockHash]) -> int:
        """Return the length in blocks of the longest prefix that every layer cache can resume from."""
        while True:
            count = min((layer_cache.num_resumable_blocks(block_hashes) for layer_cache in self.layer_caches), default=len(block_hashes))
            if count == len(block_hashes):
                return count
            block_hashes = block_hashes[:count]

    def _resume_layer_caches(self, sequence: CachedSequence, length: int) -> None:
        sequence.committed_len = length
        for layer_cache in self.layer_caches:
            layer_cache.resume(sequence.id, length, sequence.block_hashes)

    def _free_blocks(self, sequence: CachedSequence, first_index: int) -> None:
        """Release the blocks from `first_index` on, the last one first, so that the end of a sequence is evicted before its beginning.

        Released blocks whose hashes were removed from the prefix index are indexed again. The indexed blocks of all released hashes, if
        idle, become the most recently used ones.
        """
        table, block_hashes = sequence.block_table, sequence.block_hashes
        self.pool.release(reversed(table[max(first_index, len(block_hashes)) :]))
        for block_hash, block in zip(reversed(block_hashes[first_index:]), reversed(table[first_index : len(block_hashes)]), strict=True):
            self.pool.register(block_hash, block)
            self.pool.release((block,))
            self.pool.touch(block_hash)
        del table[first_index:], block_hashes[first_index:]
