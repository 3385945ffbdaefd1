"""The cache of a network: which blocks hold which rows of which sequence, and the memories that are told so."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import CapacityError
from paceline.kv_cache.block_pool import BlockPool
from paceline.kv_cache.layer_memory import LayerMemory
from paceline.kv_cache.prefix_index import Link, PrefixIndex, PrefixStats
from paceline.kv_cache.row_plan import RowPlan, TreeLayout, blocks_for, fresh_blocks_needed, plan_rows

BLOCK_SIZE = 32
"""Slots per block."""


class CachedSequence:
    """Where one sequence's rows are.

    Slots [0, committed_len) hold committed rows; [committed_len, tentative_len) belong to the pass under way. `chain` says what the
    first blocks hold that were adopted or remembered, all of them full: they are never written again while the prefix index knows them.
    `num_queried` counts the tokens for which `adopt_prefix` was asked. Only sequences of the same `salt` share blocks. `id` is its number
    in its cache; 0 = it is in none.
    """

    __slots__ = ("block_table", "chain", "committed_len", "id", "num_queried", "plan", "salt")

    def __init__(self, salt: bytes = b"", sequence_id: int = 0) -> None:
        self.salt, self.id = salt, sequence_id
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
    """Blocks of rows, and what the layers of one network keep for them.

    Rows outlive their sequence: full blocks that were remembered can be adopted by sequences that begin with the same tokens, until their
    room is needed. With `prefix_caching` off nothing is remembered or adopted.

    Args:
        memories: what the layers keep, one for each kind of layer that keeps anything.
        num_blocks: blocks that the memories have room for.
        layout: how the runtime takes trees.
    """

    def __init__(
        self,
        memories: Sequence[LayerMemory],
        num_blocks: int,
        layout: TreeLayout = TreeLayout.PATHS,
        *,
        block_size: int = BLOCK_SIZE,
        prefix_caching: bool = True,
    ) -> None:
        known_to = self.memories = list(memories)

        def forget(link: Link) -> None:  # does not hold the cache, which would only be freed by the collector then
            for memory in known_to:
                memory.forget(link)

        self.layout = layout
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.prefix_index = PrefixIndex(block_size, forget)
        self.pool = BlockPool(num_blocks, self.prefix_index)
        self._sequences: dict[int, CachedSequence] = {}
        self._last_id = 0

    @property
    def max_slots(self) -> int:
        """Rows the whole cache can hold."""
        return self.pool.num_blocks * self.block_size

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that new sequences can adopt, in use or not."""
        return self.prefix_index.num_blocks

    @property
    def stats(self) -> PrefixStats:
        """What adopting saved."""
        return self.prefix_index.stats

    @property
    def num_bytes(self) -> int:
        """Bytes of all memories."""
        return sum(memory.num_bytes for memory in self.memories)

    @property
    def bytes_per_token(self) -> int:
        """Of them, those of one row."""
        return self.num_bytes // max(1, self.max_slots)

    def add(self, memory: LayerMemory) -> None:
        """Tell a further memory, such as a drafting head's, whatever happens to the rows of this cache from now on."""
        self.memories.append(memory)

    def new_sequence(self, salt: bytes = b"") -> CachedSequence:
        """An empty sequence that owns no block yet and shares blocks with others of its salt only."""
        self._last_id += 1
        sequence = self._sequences[self._last_id] = CachedSequence(salt, self._last_id)
        return sequence

    def num_needed(self, sequence: CachedSequence, parents: Sequence[int]) -> int:
        """Blocks that `reserve` takes for such a tree."""
        if isinstance(parents, range):  # a chain, as nearly always
            return blocks_for(sequence.committed_len + len(parents), self.block_size) - len(sequence.block_table)
        return fresh_blocks_needed(parents, sequence.committed_len, len(sequence.block_table), self.layout, self.block_size)

    def reserve(self, sequence: CachedSequence, parents: Sequence[int], num_known: int = 1, *, num_firm: int | None = None) -> RowPlan:
        """Provide slots for a tree (parents[0] = -1) and lay it out; blocks that paths share partly are copied.

        Args:
            num_known: of the nodes, the first ones, a chain: they are kept together or not at all.
            num_firm: rows committed before that `truncate` will not drop one by one; None = all.

        Raises:
            CapacityError: too few free blocks; nothing was changed.
        """
        if sequence.plan is not None:
            raise RuntimeError("a pass is under way for this sequence: keep a path or cancel it first")
        length, table = sequence.committed_len, sequence.block_table
        num_needed = self.num_needed(sequence, parents)
        fresh = self.pool.allocate(num_needed) if num_needed > 0 else ()
        plan = plan_rows(parents, length, table, fresh, self.layout, self.block_size, sequence.id)
        if num_known != 1 or num_firm is not None:
            plan = replace(plan, num_known=num_known, num_firm=num_firm)
        sequence.plan = plan
        for memory in self.memories:
            for source, target in plan.copies:
                memory.copy_block(source, target)
            try:
                memory.reserve(plan)
            except CapacityError:
                self.cancel(sequence)
                raise
        return plan

    def keep_path(self, sequence: CachedSequence, node: int) -> None:
        """Commit the path from the root to `node` of the reserved tree; its other slots are given back."""
        plan = self._plan_of(sequence)
        commit = plan.commit(node)
        for memory in self.memories:
            memory.keep_path(plan, commit)
        if plan.layout is TreeLayout.CHAIN:
            if plan.fresh_blocks:
                self.pool.release(plan.paths[0].block_table[len(commit.block_table) :])
        else:
            shared = sequence.committed_len // self.block_size  # full blocks before: every path has them
            kept = set(commit.block_table[shared:])
            self.pool.release(block for block in (*sequence.block_table[shared:], *plan.fresh_blocks) if block not in kept)
        sequence.block_table = list(commit.block_table)
        sequence.committed_len = commit.committed_len
        sequence.plan = None

    def cancel(self, sequence: CachedSequence) -> None:
        """Drop what was reserved; the committed rows stay."""
        plan = sequence.plan
        if plan is not None:
            for memory in self.memories:
                memory.cancel(plan)
            self.pool.release(plan.fresh_blocks)
            sequence.plan = None

    def truncate(self, sequence: CachedSequence, length: int) -> int:
        """Keep the first `length` committed rows, or fewer where a memory has nothing to go on from behind just these.

        Rows will follow in the tail block: if others own it too it becomes a copy, else it is no longer adopted.

        Returns:
            rows kept.

        Raises:
            CapacityError: no block is free for that copy; nothing was changed.
        """
        if not 0 <= length <= sequence.committed_len:
            raise ValueError(f"cannot truncate {sequence.committed_len} committed rows to {length}")
        if not all(memory.can_cut(sequence.id, length) for memory in self.memories):
            length = self._num_reachable(sequence.chain[: length // self.block_size]) * self.block_size
        keep, table = blocks_for(length, self.block_size), sequence.block_table
        has_tail = length % self.block_size > 0
        shares_tail = has_tail and self.pool.num_owners(table[keep - 1]) > 1
        own = self.pool.allocate(int(shares_tail))
        self.cancel(sequence)
        if shares_tail:
            for memory in self.memories:
                memory.copy_block(table[keep - 1], own[0])
            keep -= 1
        elif has_tail:
            self.prefix_index.forget(table[keep - 1])
        self._give_back(sequence, keep)
        table.extend(own)
        del sequence.chain[length // self.block_size :]
        self._restart(sequence, length)
        return length

    def adopt_prefix(self, sequence: CachedSequence, token_ids: Sequence[int]) -> int:
        """Begin an empty sequence with the longest run of cached full blocks that hold the first of `token_ids`, but not the last one.

        Blocks that were idle until now do not count as free any more.

        Returns:
            rows adopted, a multiple of the block size; they are committed.
        """
        if sequence.committed_len or sequence.plan is not None:
            raise RuntimeError("only an empty sequence can adopt a prefix")
        if not self.prefix_caching:
            return 0
        found = self._find_prefix(sequence, token_ids)
        blocks = [block for _, block in found]
        sequence.chain.extend(link for link, _ in found)
        self.pool.share(blocks)
        sequence.block_table = blocks
        self._restart(sequence, len(blocks) * self.block_size)
        sequence.num_queried = len(token_ids)
        self.stats.queried_tokens += len(token_ids)
        self.stats.hit_tokens += sequence.committed_len
        return sequence.committed_len

    def count_prefix(self, sequence: CachedSequence, token_ids: Sequence[int]) -> int:
        """Rows that `adopt_prefix` would find now; nothing is changed."""
        return len(self._find_prefix(sequence, token_ids)) * self.block_size if self.prefix_caching else 0

    def return_prefix(self, sequence: CachedSequence) -> None:
        """Undo `adopt_prefix` for a sequence that has not run since; the statistics forget it too."""
        self.stats.queried_tokens -= sequence.num_queried
        self.stats.hit_tokens -= sequence.committed_len
        self._give_back(sequence, 0)
        sequence.committed_len = sequence.num_queried = 0
        for memory in self.memories:
            memory.release(sequence.id)

    def remember(self, sequence: CachedSequence, token_ids: Sequence[int]) -> None:
        """Let others adopt the blocks that became full since the last call, unless others with the same rows are known.

        Args:
            token_ids: what the rows were computed from; only the committed ones are read.
        """
        first, full = len(sequence.chain), sequence.committed_len // self.block_size
        if first == full or not self.prefix_caching:
            return
        links = self.prefix_index.links(token_ids, sequence.salt, sequence.chain, full)
        for link, block in zip(links, sequence.block_table[first:full], strict=True):
            self.prefix_index.add(link, block)
            sequence.chain.append(link)
        for memory in self.memories:
            memory.remember(sequence.id, first, sequence.chain[first:])

    def forget(self, sequence: CachedSequence) -> None:
        """Let nobody else adopt this sequence's blocks: what a pass left in them is not to be trusted."""
        for block in sequence.block_table:
            self.prefix_index.forget(block)
        for link in sequence.chain:
            for memory in self.memories:
                memory.forget(link)
        sequence.chain.clear()

    def release(self, sequence: CachedSequence) -> None:
        """Give every block back; the sequence must not be used again. What was remembered can be adopted until its room is needed."""
        if self._sequences.get(sequence.id) is not sequence:  # its blocks may have new owners
            raise RuntimeError("the sequence was released before, or is another cache's")
        del self._sequences[sequence.id]
        self.cancel(sequence)
        self._give_back(sequence, 0)
        for memory in self.memories:
            memory.release(sequence.id)

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

    def _find_prefix(self, sequence: CachedSequence, token_ids: Sequence[int]) -> list[tuple[Link, int]]:
        """The longest run of known full blocks that hold the first of `token_ids`, but not the last one, and can be gone on from."""
        found: list[tuple[Link, int]] = []
        for link in self.prefix_index.links(token_ids, sequence.salt, (), (len(token_ids) - 1) // self.block_size):
            block = self.prefix_index.find(link)
            if block is None:
                break
            found.append((link, block))
        return found[: self._num_reachable([link for link, _ in found])]

    def _num_reachable(self, links: Sequence[Link]) -> int:
        """Behind how many of these blocks every memory can go on; the most."""
        while True:
            count = min((memory.num_reachable(links) for memory in self.memories), default=len(links))
            if count == len(links):
                return count
            links = links[:count]

    def _restart(self, sequence: CachedSequence, length: int) -> None:
        """Go on behind the first `length` rows, whose blocks are there."""
        sequence.committed_len = length
        for memory in self.memories:
            memory.restart(sequence.id, length, sequence.chain)

    def _give_back(self, sequence: CachedSequence, first: int) -> None:
        """Drop the blocks from index `first` on.

        The last one first, so that the end of a text is evicted before its beginning. If the index knows another block with the same
        rows, that one counts as used now; if it knows none any more, it learns this one.
        """
        table, chain = sequence.block_table, sequence.chain
        self.pool.release(reversed(table[max(first, len(chain)) :]))
        for link, block in zip(reversed(chain[first:]), reversed(table[first : len(chain)]), strict=True):
            self.prefix_index.add(link, block)
            self.pool.release((block,))
            self.prefix_index.touch(link)
        del table[first:], chain[first:]

    def _plan_of(self, sequence: CachedSequence) -> RowPlan:
        if sequence.plan is None:
            raise RuntimeError("no pass is under way for this sequence: reserve first")
        return sequence.plan


def blocks_in(num_bytes: int, block_bytes: int) -> int:
    """Whole blocks that fit `num_bytes`.

    Raises:
        CapacityError: not even one fits.
    """
    count = num_bytes // block_bytes
    if count < 1:
        raise CapacityError(
            f"a cache of {num_bytes / 1e9:.2g} GB holds no block of {block_bytes} bytes: raise kv_cache_gb above {block_bytes / 1e9:.2g}"
        )
    return count
