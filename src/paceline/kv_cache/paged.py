"""The key/value cache: one allocation in blocks, and the sequences that live in it."""

from collections.abc import Sequence
from typing import Any

from paceline.errors import CapacityError
from paceline.kv_cache.block_pool import BlockPool
from paceline.kv_cache.prefix_index import Link, PrefixIndex, PrefixStats
from paceline.kv_cache.row_plan import RowPlan, TreeLayout, blocks_for, fresh_blocks_needed, plan_rows

BLOCK_SIZE = 32
"""Slots per block."""


class CachedSequence:
    """Where one sequence's keys and values are.

    Slots [0, committed_len) hold committed rows; [committed_len, tentative_len) belong to the pass under way. `chain` says what the
    first blocks hold that were adopted or remembered, all of them full: they are never written again while the prefix index knows them.
    `num_queried` is the length of the text whose beginning it was to adopt.
    """

    __slots__ = ("block_table", "chain", "committed_len", "num_queried", "plan")

    def __init__(self) -> None:
        self.block_table: list[int] = []
        self.committed_len = 0
        self.plan: RowPlan | None = None
        self.chain: list[Link] = []
        self.num_queried = 0

    @property
    def tentative_len(self) -> int:
        """Committed rows plus the longest path of the pass under way."""
        if self.plan is None:
            return self.committed_len
        return self.committed_len + max(path.num_rows for path in self.plan.paths)


class KVCache:
    """Blocks of one storage array [2·L, num_blocks, K, block_size, D], keys of layer i at 2·i, values at 2·i + 1.

    `storage` is whatever the runtime computes with (a numpy array or a torch tensor): only indexing is used here.

    Rows outlive their sequence: full blocks that were remembered can be adopted by sequences that begin with the same tokens, until their
    room is needed. With `prefix_caching` off nothing is remembered or adopted.
    """

    def __init__(self, storage: Any, layout: TreeLayout = TreeLayout.PATHS, *, prefix_caching: bool = True) -> None:
        self.storage = storage
        self.layout = layout
        self.block_size = int(storage.shape[3])
        self.prefix_caching = prefix_caching
        self.prefix_index = PrefixIndex(self.block_size)
        self.pool = BlockPool(int(storage.shape[1]), self.prefix_index)
        self._storages = [storage]
        self._sequences: dict[int, CachedSequence] = {}

    @property
    def max_slots(self) -> int:
        """Rows the whole cache can hold."""
        return (self.pool.num_blocks - 1) * self.block_size

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose rows are known, in use or not: what new sequences can adopt."""
        return self.prefix_index.num_blocks

    @property
    def stats(self) -> PrefixStats:
        """What adopting saved."""
        return self.prefix_index.stats

    def attach(self, storage: Any) -> None:
        """Keep a companion [.., num_blocks, ..] whose axis 1 is blocks: whole blocks that are copied here are copied there too.

        It is for committed rows: those of a pass under way may still be moved within their blocks (`mask` layout), here only.

        Raises:
            ValueError: it has another number of blocks.
        """
        if int(storage.shape[1]) != self.pool.num_blocks:
            raise ValueError(f"a companion storage has {storage.shape[1]} blocks, the cache {self.pool.num_blocks}: give it as many")
        self._storages.append(storage)

    def new_sequence(self) -> CachedSequence:
        """An empty sequence that owns no block yet."""
        sequence = CachedSequence()
        self._sequences[id(sequence)] = sequence
        return sequence

    def num_needed(self, sequence: CachedSequence, parents: Sequence[int]) -> int:
        """Blocks that `reserve` takes for such a tree."""
        return fresh_blocks_needed(parents, sequence.committed_len, len(sequence.block_table), self.layout, self.block_size)

    def reserve(self, sequence: CachedSequence, parents: Sequence[int]) -> RowPlan:
        """Provide slots for a tree (parents[0] = -1) and lay it out; blocks that paths share partly are copied.

        Raises:
            CapacityError: too few free blocks; nothing was changed.
        """
        if sequence.plan is not None:
            raise RuntimeError("a pass is under way for this sequence: keep a path or cancel it first")
        length, table = sequence.committed_len, sequence.block_table
        fresh = self.pool.allocate(self.num_needed(sequence, parents))
        plan = plan_rows(parents, length, table, fresh, self.layout, self.block_size)
        for source, target in plan.copies:
            self._copy_block(source, target)
        sequence.plan = plan
        return plan

    def keep_path(self, sequence: CachedSequence, node: int) -> None:
        """Commit the path from the root to `node` of the reserved tree; its other slots are given back."""
        plan = self._plan_of(sequence)
        commit = plan.commit(node)
        for source, target in commit.moves:
            self.storage[:, commit.block_table[target // self.block_size], :, target % self.block_size] = self.storage[
                :, plan.paths[0].block_table[source // self.block_size], :, source % self.block_size
            ]
        shared = sequence.committed_len // self.block_size  # full blocks before: every path has them
        kept = set(commit.block_table[shared:])
        self.pool.release(block for block in (*sequence.block_table[shared:], *plan.fresh_blocks) if block not in kept)
        sequence.block_table = list(commit.block_table)
        sequence.committed_len = commit.committed_len
        sequence.plan = None

    def cancel(self, sequence: CachedSequence) -> None:
        """Drop what was reserved; the committed rows stay."""
        if sequence.plan is not None:
            self.pool.release(sequence.plan.fresh_blocks)
            sequence.plan = None

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Keep the first `length` committed rows.

        Rows will follow in the tail block: if others own it too it becomes a copy, else it is no longer adopted.

        Raises:
            CapacityError: no block is free for that copy; nothing was changed.
        """
        if not 0 <= length <= sequence.committed_len:
            raise ValueError(f"cannot truncate {sequence.committed_len} committed rows to {length}")
        keep, table = blocks_for(length, self.block_size), sequence.block_table
        has_tail = length % self.block_size > 0
        shares_tail = has_tail and self.pool.num_owners(table[keep - 1]) > 1
        own = self.pool.allocate(int(shares_tail))
        self.cancel(sequence)
        if shares_tail:
            self._copy_block(table[keep - 1], own[0])
            keep -= 1
        elif has_tail:
            self.prefix_index.forget(table[keep - 1])
        self._give_back(sequence, keep)
        table.extend(own)
        del sequence.chain[length // self.block_size :]
        sequence.committed_len = length

    def adopt_prefix(self, sequence: CachedSequence, token_ids: Sequence[int], *, salt: bytes = b"") -> int:
        """Begin an empty sequence with the longest run of cached full blocks that hold the first of `token_ids`, but not the last one.

        Takes no free block, only idle ones out of those that can be had: see what is left before promising more.

        Returns:
            rows adopted, a multiple of the block size; they are committed.
        """
        if sequence.committed_len or sequence.plan is not None:
            raise RuntimeError("only an empty sequence can adopt a prefix")
        if not self.prefix_caching:
            return 0
        found = self._find_prefix(token_ids, salt)
        blocks = [block for _, block in found]
        sequence.chain.extend(link for link, _ in found)
        self.pool.share(blocks)
        sequence.block_table = blocks
        sequence.committed_len = len(blocks) * self.block_size
        sequence.num_queried = len(token_ids)
        self.stats.queried_tokens += len(token_ids)
        self.stats.hit_tokens += sequence.committed_len
        return sequence.committed_len

    def count_prefix(self, token_ids: Sequence[int], *, salt: bytes = b"") -> int:
        """Rows that `adopt_prefix` would find now; nothing is changed."""
        return len(self._find_prefix(token_ids, salt)) * self.block_size if self.prefix_caching else 0

    def return_prefix(self, sequence: CachedSequence) -> None:
        """Undo `adopt_prefix` for a sequence that has not run since: it is empty again, and it counts as if it had not asked."""
        self.stats.queried_tokens -= sequence.num_queried
        self.stats.hit_tokens -= sequence.committed_len
        self._give_back(sequence, 0)
        sequence.committed_len = sequence.num_queried = 0

    def remember(self, sequence: CachedSequence, token_ids: Sequence[int], *, salt: bytes = b"") -> None:
        """Let others adopt the blocks that became full since the last call; of two with the same rows the first stays known.

        Args:
            token_ids: what the rows were computed from; only the committed ones are read.
            salt: whoever adopts must give the same; that of a sequence's first call (or `adopt_prefix`) counts.
        """
        first, full = len(sequence.chain), sequence.committed_len // self.block_size
        if first == full or not self.prefix_caching:
            return
        links = self.prefix_index.links(token_ids, salt, sequence.chain, full)
        for link, block in zip(links, sequence.block_table[first:full], strict=True):
            self.prefix_index.add(link, block)
            sequence.chain.append(link)

    def forget(self, sequence: CachedSequence) -> None:
        """Let nobody else adopt this sequence's blocks: what a pass left in them is not to be trusted."""
        for block in sequence.block_table:
            self.prefix_index.forget(block)
        sequence.chain.clear()

    def release(self, sequence: CachedSequence) -> None:
        """Give every block back; the sequence must not be used again. What was remembered can be adopted until its room is needed."""
        if self._sequences.pop(id(sequence), None) is None:  # its blocks may have new owners
            raise RuntimeError("the sequence was released before, or is another cache's")
        self.cancel(sequence)
        self._give_back(sequence, 0)

    def check(self) -> None:
        """Raise RuntimeError unless every owned block belongs to the sequences that name it and no known block can be written to."""
        tables: list[Sequence[int]] = []
        for sequence in self._sequences.values():
            if len(sequence.block_table) != blocks_for(sequence.committed_len, self.block_size):
                raise RuntimeError(f"{sequence.committed_len} committed rows stand in {len(sequence.block_table)} blocks")
            tables.append(sequence.block_table)
            if sequence.plan is not None:
                tables.append(sequence.plan.fresh_blocks)
            self._check_known(sequence)
        self.pool.check(tables)

    def _check_known(self, sequence: CachedSequence) -> None:
        full = sequence.committed_len // self.block_size
        if len(sequence.chain) > full:
            raise RuntimeError(f"a chain of {len(sequence.chain)} links describes {full} full blocks")
        written = [*sequence.block_table[full:], *(sequence.plan.fresh_blocks if sequence.plan is not None else ())]
        if any(self.prefix_index.link_of(block) is not None for block in written):
            raise RuntimeError("the prefix index knows a block that is being written")
        for link, block in zip(sequence.chain, sequence.block_table, strict=False):
            if self.prefix_index.link_of(block) not in {None, link}:
                raise RuntimeError(f"block {block} is known for other rows than those it holds")

    def _find_prefix(self, token_ids: Sequence[int], salt: bytes) -> list[tuple[Link, int]]:
        """The longest run of known full blocks that hold the first of `token_ids`, but not the last one."""
        found: list[tuple[Link, int]] = []
        for link in self.prefix_index.links(token_ids, salt, (), (len(token_ids) - 1) // self.block_size):
            block = self.prefix_index.find(link)
            if block is None:
                break
            found.append((link, block))
        return found

    def _give_back(self, sequence: CachedSequence, first: int) -> None:
        """Drop the blocks from index `first` on.

        From the end, so that the end of a chain is evicted before what leads to it. Where the index knows a twin in place of a block, the
        twin was used as well; where that twin is gone by now, the block takes its place.
        """
        table, chain = sequence.block_table, sequence.chain
        self.pool.release(reversed(table[max(first, len(chain)) :]))
        for link, block in zip(reversed(chain[first:]), reversed(table[first : len(chain)]), strict=True):
            self.prefix_index.add(link, block)
            self.pool.release((block,))
            self.prefix_index.touch(link)
        del table[first:], chain[first:]

    def _copy_block(self, source: int, target: int) -> None:
        for storage in self._storages:
            storage[:, target] = storage[:, source]

    def _plan_of(self, sequence: CachedSequence) -> RowPlan:
        if sequence.plan is None:
            raise RuntimeError("no pass is under way for this sequence: reserve first")
        return sequence.plan


def blocks_in(num_bytes: int, block_bytes: int) -> int:
    """Whole blocks that fit `num_bytes`.

    Raises:
        CapacityError: not even a scratch block and one more fit.
    """
    count = num_bytes // block_bytes
    if count < 2:
        raise CapacityError(
            f"a cache of {num_bytes / 1e9:.2g} GB holds {count} blocks of {block_bytes} bytes; at least 2 are needed: raise cache_gb"
        )
    return count
