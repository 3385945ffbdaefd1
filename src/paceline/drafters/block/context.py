"""Cache of a block drafter's context: keys and values computed from the target's hidden states.

Context row t depends on the tokens up to position t, as the target's own cache row t does. So both use the same block and slot, and copied,
forked, shared and evicted blocks of the target stay right for the drafter. Each slot also stores a hash of the tokens up to it. After a
prefix hit the hashes show which context rows are cached. Missing rows are not attended to.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.block.network import PendingContext
from paceline.drafters.recurrent_heads.cache import HASH_FACTOR, SPARE_BLOCKS, prefix_hashes
from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.kv_cache.full_attention import PagedCache
from paceline.kv_cache.row_plan import blocks_for
from paceline.runtimes.base import FloatArray, Network, RowRange
from paceline.speculation.drafter import RequestState
from paceline.speculation.request import Request


@dataclass(slots=True)
class _RequestContext:
    """Context rows of one request: positions [first_cached, num_cached) have cached keys and values."""

    sequence: CachedSequence
    first_cached: int
    num_cached: int
    num_observed: int
    prefix_hash: int  # hash of the tokens before position num_cached
    pending_hidden_states: list[FloatArray] = field(default_factory=list)  # hidden states of positions num_cached to num_observed - 1


class ContextCache:
    """Context keys and values of the committed positions of all requests of one target.

    Args:
        runtime: the drafter's network; this class allocates its KV cache.
        cache: the target's KV cache.
        window: maximum number of positions that a draft row attends to, its own position included.
    """

    def __init__(self, runtime: Network, cache: KVCache, *, window: int) -> None:
        num_blocks = cache.pool.num_blocks
        rows = [PagedCache(memory.storage) for memory in runtime.allocate_kv(num_blocks + SPARE_BLOCKS)]
        self.block_size, self.window = cache.block_size, window
        self.bytes_per_token = sum(memory.num_bytes for memory in rows) // max(1, cache.max_slots)
        self._spare_blocks = range(num_blocks, num_blocks + SPARE_BLOCKS)
        self._hashes = np.zeros((1, num_blocks, self.block_size), np.uint64)
        self._powers = np.cumprod(np.full(cache.max_slots + 1, HASH_FACTOR, np.uint64), dtype=np.uint64)
        self._contexts = RequestState[_RequestContext]()
        for memory in (*rows, PagedCache(self._hashes)):
            cache.add_layer_cache(memory)

    def append_hidden_states(self, request: Request, start: int, hidden_states: FloatArray) -> int:
        """Store the target's hidden states [T, F] of positions `start`, `start` + 1, …; return how many positions lack context rows."""
        context = self._contexts.get(request)
        if context is None or context.sequence is not request.cached_sequence or context.num_observed != start:
            context = self._contexts[request] = self._new_context(request, start)
        context.pending_hidden_states.append(hidden_states)
        context.num_observed = start + len(hidden_states)
        return context.num_observed - context.num_cached

    def release(self, request: Request) -> None:
        """Drop the record of a request. Its keys and values remain usable for prefix hits until the target evicts the blocks."""
        self._contexts.pop(request)

    def pending_rows(self, request: Request) -> PendingContext | None:
        """Return what to compute: committed positions without context keys and values; None if there are none."""
        context = self._contexts.get(request)
        if context is None or context.num_cached == context.num_observed:
            return None
        if len(context.pending_hidden_states) > 1:
            context.pending_hidden_states = [np.concatenate(context.pending_hidden_states)]
        table = np.array(request.cached_sequence.block_table, np.int32)
        begin = context.num_cached
        return PendingContext(
            context.pending_hidden_states[0],
            RowRange(0, context.num_observed - begin, begin, table, None, min(begin, context.first_cached)),
        )

    def drop_oldest(self, request: Request, num_kept: int) -> None:
        """Drop all pending positions but the last `num_kept`. No draft attends to them, nor to positions before them."""
        context = self._contexts.get(request)
        if context is None or context.num_observed - context.num_cached <= num_kept:
            return
        begin, end = context.num_cached, context.num_observed - num_kept
        hashes = prefix_hashes(request.token_ids[begin:end], self._powers[begin:], context.prefix_hash)
        self._set_hashes(request, begin, np.zeros(end - begin, np.uint64))  # an earlier request may have left equal hashes
        context.first_cached = context.num_cached = end
        context.prefix_hash = int(hashes[-1])
        num_dropped, parts = end - begin, context.pending_hidden_states
        while num_dropped >= len(parts[0]):
            num_dropped -= len(parts.pop(0))
        parts[0] = parts[0][num_dropped:].copy()  # a view would keep the dropped rows in memory

    def mark_computed(self, request: Request) -> None:
        """Record that the keys and values of all pending positions are now cached."""
        context = self._contexts[request]
        begin, end = context.num_cached, context.num_observed
        hashes = prefix_hashes(request.token_ids[begin:end], self._powers[begin:], context.prefix_hash)
        self._set_hashes(request, begin, hashes)
        context.prefix_hash, context.num_cached, context.pending_hidden_states = int(hashes[-1]), end, []

    def _set_hashes(self, request: Request, start: int, hashes: NDArray[np.uint64]) -> None:
        """Store hashes of the slots of positions `start`, `start` + 1, …; 0 = the slot has no context row."""
        table, size = np.array(request.cached_sequence.block_table, np.int64), self.block_size
        slots = np.arange(start, start + len(hashes))
        self._hashes[0, table[slots // size], slots % size] = hashes

    def draft_row_range(self, request: Request, num_rows: int, num_used_spare_blocks: int) -> RowRange | None:
        """Return the cache rows for a draft; None if context rows of the request are missing or spare blocks run out.

        Args:
            num_rows: rows of the draft, the row of the last committed token included.
            num_used_spare_blocks: number of spare blocks that other requests of the pass already use.
        """
        context, last_position = self._contexts.get(request), len(request.token_ids) - 1
        if context is None or context.num_cached != last_position:
            return None
        table = request.cached_sequence.block_table
        missing = self.num_spare_blocks_needed(request, num_rows)
        if missing > SPARE_BLOCKS - num_used_spare_blocks:
            return None
        if missing:
            table = [*table, *self._spare_blocks[num_used_spare_blocks : num_used_spare_blocks + missing]]
        first = min(last_position, max(context.first_cached, last_position + num_rows - self.window))
        mask = np.ones((num_rows, num_rows), np.bool_)
        return RowRange(0, num_rows, last_position, np.array(table, np.int32), mask, first)

    def has_all_hidden_states(self, request: Request) -> bool:
        """Return whether hidden states of all tokens of the request but the last have been received."""
        context = self._contexts.get(request)
        return context is not None and context.num_observed == len(request.token_ids) - 1 and context.sequence is request.cached_sequence

    def num_pending(self, request: Request) -> int:
        """Return the number of committed positions without context rows."""
        context = self._contexts.get(request)
        return 0 if context is None else context.num_observed - context.num_cached

    def num_spare_blocks_needed(self, request: Request, num_rows: int) -> int:
        """Return how many spare blocks a draft of `num_rows` rows needs."""
        end = len(request.token_ids) - 1 + num_rows
        return max(0, blocks_for(end, self.block_size) - len(request.cached_sequence.block_table))

    def _new_context(self, request: Request, start: int) -> _RequestContext:
        """Return the record of a new request whose first `start` positions are a prefix hit; their context rows may be cached."""
        if start == 0:
            return _RequestContext(request.cached_sequence, 0, 0, 0, 0)
        hashes = prefix_hashes(request.token_ids[:start], self._powers, 0)
        slots, size = np.arange(start), self.block_size
        table = np.array(request.cached_sequence.block_table, np.int64)
        is_cached = self._hashes[0, table[slots // size], slots % size] == hashes
        uncached = np.flatnonzero(~is_cached)
        return _RequestContext(request.cached_sequence, int(uncached[-1]) + 1 if len(uncached) else 0, start, start, int(hashes[-1]))
