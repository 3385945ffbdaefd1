"""KV cache of a drafting head, in the same blocks and slots as the target's KV cache.

A head's keys and values of a slot depend on the tokens up to it, as the target's own do. So copied, forked, shared and evicted blocks of
the target remain valid for the head. Each slot stores a hash of the tokens up to it. After a prefix hit the hashes show which slots are
computed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.kv_cache.full_attention import PagedCache
from paceline.kv_cache.row_plan import num_blocks_for
from paceline.runtimes.base import FloatArray, IntArray, Network
from paceline.speculation.drafter import RequestState
from paceline.speculation.request import Request

NUM_SPARE_BLOCKS = 64
"""Number of spare blocks: cache blocks for draft rows after the last block of a sequence. Every pass uses the same ones."""

_HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, like `_HASH_FACTOR`, so that different tokens have different hashes mod 2**64
_HASH_FACTOR, _WORD_MASK = np.uint64(0xD1342543DE82EF95), 0xFFFFFFFFFFFFFFFF
_MAX_TOKENS_HASHED_IN_PYTHON = 16  # more tokens are hashed with NumPy


@dataclass(slots=True)
class HeadSlots:
    """The slots [first_slot, end_slot) of one request, which the head attends to, and the inputs of later slots."""

    sequence: CachedSequence
    first_slot: int
    end_slot: int  # slot after the last computed or dropped one
    num_observed_positions: int  # number of positions whose hidden states have been received
    prefix_hash: int  # hash of the tokens before `end_slot`
    pending_hidden_states: list[FloatArray] = field(default_factory=list)  # the target's hidden states for slots from `end_slot` on

    def join_pending(self) -> FloatArray:
        """Return the pending hidden states as one array."""
        if len(self.pending_hidden_states) > 1:
            self.pending_hidden_states = [np.concatenate(self.pending_hidden_states)]
        return self.pending_hidden_states[0]


class HeadCache(ABC):
    """The cached slots of all requests of one target.

    Args:
        runtime: the head's network; this class allocates its KV cache.
        cache: the target's KV cache.
        window: maximum number of slots that a row attends to, its own slot included.
    """

    def __init__(self, runtime: Network, cache: KVCache, *, window: int) -> None:
        num_blocks = cache.pool.num_blocks
        layer_caches = [PagedCache(layer_cache.storage) for layer_cache in runtime.allocate_kv(num_blocks + NUM_SPARE_BLOCKS)]
        self.block_size, self.window = cache.block_size, window
        self.bytes_per_token = sum(layer_cache.num_bytes for layer_cache in layer_caches) // max(1, cache.max_slots)
        self._spare_blocks = range(num_blocks, num_blocks + NUM_SPARE_BLOCKS)
        self._hashes = np.zeros((1, num_blocks, self.block_size), np.uint64)  # 0 = the slot is not computed
        self._powers = np.cumprod(np.full(cache.max_slots + 1, _HASH_FACTOR, np.uint64), dtype=np.uint64)
        self._hash_view, self._power_view = self._hashes.data, self._powers.data  # memoryviews are faster to index than arrays
        self._slots = RequestState[HeadSlots]()
        for layer_cache in (*layer_caches, PagedCache(self._hashes)):
            cache.add_layer_cache(layer_cache)

    def release(self, request: Request) -> None:
        """Drop the record of a request. Its keys and values remain usable for prefix hits until the target evicts the blocks."""
        self._slots.pop(request)

    def num_spare_blocks_needed(self, request: Request, end: int) -> int:
        """Return how many spare blocks the slots of a request up to `end` need."""
        return max(0, num_blocks_for(end, self.block_size) - len(request.cached_sequence.block_table))

    def _table_up_to(self, request: Request, end: int, num_used_spare_blocks: int) -> IntArray | None:
        """Return the blocks of a request's slots up to `end`, spare blocks included; None if there are too few spare blocks."""
        table, count = request.cached_sequence.block_table, self.num_spare_blocks_needed(request, end)
        if count > NUM_SPARE_BLOCKS - num_used_spare_blocks:
            return None
        if count:
            table = [*table, *self._spare_blocks[num_used_spare_blocks : num_used_spare_blocks + count]]
        return np.array(table, np.int32)

    def _add_hidden_states(self, request: Request, start: int, hidden_states: FloatArray) -> HeadSlots:
        """Append the target's hidden states [T, F] of positions `start`, `start` + 1, … to the pending ones of a request."""
        slots = self._slots.get(request)
        if slots is None or slots.sequence is not request.cached_sequence or slots.num_observed_positions != start:
            slots = self._slots[request] = self._create_slots(request, start)
        slots.pending_hidden_states.append(hidden_states)
        slots.num_observed_positions = start + len(hidden_states)
        return slots

    @abstractmethod
    def _create_slots(self, request: Request, start: int) -> HeadSlots:
        """Return the cache rows of a new request whose first `start` positions are a prefix hit; the head may have computed some."""

    def _first_computed_slot(self, request: Request, hashes: NDArray[np.uint64]) -> int:
        """Return the slot after the last uncomputed slot of a prefix. `hashes`: hashes of the prefix's tokens."""
        uncomputed = np.flatnonzero(self._hashes[self._slot_indices(request, 0, len(hashes))] != hashes)
        return int(uncomputed[-1]) + 1 if len(uncomputed) else 0

    def _hash_tokens(self, token_ids: Sequence[int] | IntArray, start: int, prefix_hash: int) -> NDArray[np.uint64]:
        """Return for each token the hash of all tokens up to it, a polynomial of the tokens.

        Args:
            start: slot of the first token.
            prefix_hash: hash of the tokens before it; 0 = there are none.
        """
        values = (np.asarray(token_ids, np.uint64) + np.uint64(1)) * _HASH_MULTIPLIER * self._powers[start : start + len(token_ids)]
        values[:1] += np.uint64(prefix_hash)
        return np.cumsum(values, dtype=np.uint64)

    def _advance_end(self, request: Request, slots: HeadSlots, token_ids: Sequence[int] | IntArray, *, is_computed: bool = True) -> None:
        """Add slots for the next `token_ids` of a request. `is_computed`: keys and values are cached, so hashes are stored."""
        if is_computed and len(token_ids) <= _MAX_TOKENS_HASHED_IN_PYTHON:  # 25 times as fast as NumPy for one token (measured)
            table, size, prefix_hash = request.cached_sequence.block_table, self.block_size, slots.prefix_hash
            for slot, token in enumerate(token_ids, slots.end_slot):
                prefix_hash = ((int(token) + 1) * int(_HASH_MULTIPLIER) * self._power_view[slot] + prefix_hash) & _WORD_MASK
                self._hash_view[0, table[slot // size], slot % size] = prefix_hash
        else:
            hashes = self._hash_tokens(token_ids, slots.end_slot, slots.prefix_hash)
            # the hash of an earlier request may equal the new one: an uncomputed slot would then count as computed
            self._hashes[self._slot_indices(request, slots.end_slot, len(hashes))] = hashes if is_computed else 0
            prefix_hash = int(hashes[-1])
        slots.prefix_hash, slots.end_slot = prefix_hash, slots.end_slot + len(token_ids)

    def _slot_indices(self, request: Request, start: int, count: int) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
        """Return the indices in `_hashes` of `count` slots from `start` on."""
        slots, size = np.arange(start, start + count), self.block_size
        first = start // size
        table = np.array(request.cached_sequence.block_table[first : num_blocks_for(start + count, size)], np.int64)
        return 0, table[slots // size - first], slots % size
