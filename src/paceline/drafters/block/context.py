"""Cache of a block drafter's context: keys and values computed from the target's hidden states, at the target's own blocks and slots.

A row depends only on the tokens up to its position, like the target's own rows, so copies, forks, shared prefixes and eviction of blocks
apply to both. Each slot stores a hash of the tokens up to it. After a prefix hit the hashes show which rows are cached; missing rows
are not attended to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.block.network import PendingContext
from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.kv_cache.full_attention import PagedCache
from paceline.kv_cache.row_plan import blocks_for
from paceline.runtimes.base import FloatArray, Network, RowRange
from paceline.speculation.drafter import RequestState
from paceline.speculation.request import Request

SPARE_BLOCKS = 64
"""Blocks for draft rows that do not fit the blocks of a sequence."""

_STEP, _FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1342543DE82EF95)  # odd, so that a different token always changes the hash


@dataclass(slots=True)
class _Context:
    """State of one request: positions [first, num_rows) are cached; hidden states of num_rows … num_seen - 1 are pending."""

    sequence: CachedSequence
    first: int
    num_rows: int
    num_seen: int
    hash: np.uint64  # hash of the tokens before position num_rows
    pending: list[FloatArray] = field(default_factory=list)


class ContextCache:
    """Cached keys and values of the committed positions of all requests of one target.

    Args:
        runtime: the drafter's network, whose KV cache is allocated here.
        cache: the target's KV cache.
        window: positions that a draft row may attend to, its own included.
    """

    def __init__(self, runtime: Network, cache: KVCache, *, window: int) -> None:
        num_blocks = cache.pool.num_blocks
        rows = [PagedCache(memory.storage) for memory in runtime.allocate_kv(num_blocks + SPARE_BLOCKS)]
        self.block_size, self.window = cache.block_size, window
        self.bytes_per_token = sum(memory.num_bytes for memory in rows) // max(1, cache.max_slots)
        self._spare_blocks = range(num_blocks, num_blocks + SPARE_BLOCKS)
        self._hashes = np.zeros((1, num_blocks, self.block_size), np.uint64)
        self._powers = np.cumprod(np.full(cache.max_slots + 1, _FACTOR, np.uint64), dtype=np.uint64)
        self._contexts = RequestState[_Context]()
        for memory in (*rows, PagedCache(self._hashes)):
            cache.add_layer_cache(memory)

    def observe(self, request: Request, start: int, features: FloatArray) -> int:
        """Store hidden states [T, F] of positions from `start` on; return how many have no keys and values yet."""
        context = self._contexts.get(request)
        if context is None or context.sequence is not request.sequence or context.num_seen != start:
            context = self._contexts[request] = self._new_context(request, start)
        context.pending.append(np.array(features, np.float32))
        context.num_seen = start + len(features)
        return context.num_seen - context.num_rows

    def release(self, request: Request) -> None:
        """Drop the state of a request; its cached keys and values stay as long as the target's blocks."""
        self._contexts.pop(request)

    def pending_rows(self, request: Request) -> PendingContext | None:
        """Return the committed positions whose keys and values are not computed yet; None if there are none."""
        context = self._contexts.get(request)
        if context is None or context.num_rows == context.num_seen:
            return None
        if len(context.pending) > 1:
            context.pending = [np.concatenate(context.pending)]
        table = np.array(request.sequence.block_table, np.int32)
        begin = context.num_rows
        return PendingContext(context.pending[0], RowRange(0, context.num_seen - begin, begin, table, None, min(begin, context.first)))

    def drop_oldest(self, request: Request, num_kept: int) -> None:
        """Drop all pending positions but the last `num_kept`. No draft attends to them, nor to earlier ones."""
        rows = self.pending_rows(request)
        if rows is None or rows.rows.num_rows <= num_kept:
            return
        context = self._contexts[request]
        begin = context.num_seen - num_kept
        hashes = self._prefix_hashes(request.token_ids[context.num_rows : begin], context.num_rows, context.hash)
        context.first = context.num_rows = begin
        context.hash, context.pending = hashes[-1], [context.pending[0][-num_kept:].copy()]

    def mark_computed(self, request: Request) -> None:
        """Record that keys and values of the pending positions are now cached."""
        context = self._contexts[request]
        begin, end = context.num_rows, context.num_seen
        hashes = self._prefix_hashes(request.token_ids[begin:end], begin, context.hash)
        table, size = np.array(request.sequence.block_table, np.int64), self.block_size
        slots = np.arange(begin, end)
        self._hashes[0, table[slots // size], slots % size] = hashes
        context.hash, context.num_rows, context.pending = hashes[-1], end, []

    def draft_row_range(self, request: Request, num_rows: int, num_used_spare_blocks: int) -> RowRange | None:
        """Return where the rows of a draft are written; None if context rows are missing or spare blocks run out.

        Args:
            num_rows: of the draft, including that of the last token.
            num_used_spare_blocks: spare blocks that other requests of the pass already use.
        """
        context, root = self._contexts.get(request), len(request.token_ids) - 1
        if context is None or context.num_rows != root:
            return None
        table = request.sequence.block_table
        missing = self.num_spare_blocks_needed(request, num_rows)
        if missing > SPARE_BLOCKS - num_used_spare_blocks:
            return None
        if missing:
            table = [*table, *self._spare_blocks[num_used_spare_blocks : num_used_spare_blocks + missing]]
        first = min(root, max(context.first, root + num_rows - self.window))
        mask = np.ones((num_rows, num_rows), np.bool_)
        return RowRange(0, num_rows, root, np.array(table, np.int32), mask, first)

    def is_ready(self, request: Request) -> bool:
        """Return whether the target's hidden states of all tokens but the last one have been observed."""
        context = self._contexts.get(request)
        return context is not None and context.num_seen == len(request.token_ids) - 1 and context.sequence is request.sequence

    def num_pending_rows(self, request: Request) -> int:
        """Return the number of committed positions whose keys and values are not computed yet."""
        context = self._contexts.get(request)
        return 0 if context is None else context.num_seen - context.num_rows

    def num_spare_blocks_needed(self, request: Request, num_rows: int) -> int:
        """Return the number of spare blocks that a draft of `num_rows` rows needs."""
        end = len(request.token_ids) - 1 + num_rows
        return max(0, blocks_for(end, self.block_size) - len(request.sequence.block_table))

    def _new_context(self, request: Request, start: int) -> _Context:
        """Return the state of a new request, with the rows before `start` that an earlier request with the same tokens computed."""
        if start == 0:
            return _Context(request.sequence, 0, 0, 0, np.uint64(0))
        hashes = self._prefix_hashes(request.token_ids[:start], 0, np.uint64(0))
        slots, size = np.arange(start), self.block_size
        table = np.array(request.sequence.block_table, np.int64)
        is_known = self._hashes[0, table[slots // size], slots % size] == hashes
        unknown = np.flatnonzero(~is_known)
        return _Context(request.sequence, int(unknown[-1]) + 1 if len(unknown) else 0, start, start, hashes[-1])

    def _prefix_hashes(self, token_ids: Sequence[int], first: int, before: np.uint64) -> NDArray[np.uint64]:
        """Return the hashes of slots from `first` on: a polynomial of all tokens up to each."""
        values = (np.asarray(token_ids, np.uint64) + np.uint64(1)) * _STEP * self._powers[first : first + len(token_ids)]
        values[:1] += before
        return np.cumsum(values, dtype=np.uint64)
