"""KV cache of a head's feature pairs, in the same blocks and slots as the target's KV cache.

The head's input at slot s is a feature pair: token x_s and the target's feature f_(s-1) of the position before it. Its keys and values
depend on the tokens up to s, as the target's cache row s does. So copied, forked, shared and evicted blocks stay right for the head:

    slot                       0     1        2        …   n
    input of the target        x_0   x_1      x_2          x_n, the last committed token, which the target has not run yet
    input of the head          -     x_1 f_0  x_2 f_1      x_n f_(n-1), then the feature pairs of draft tokens, dropped after the draft

Slot 0 has no feature pair and is never attended to; only for PARD-2 draft models it has one, with a feature of zeros. Each slot stores a
hash of the tokens up to it. After a prefix hit the hashes show which slots are computed. The first feature pair after the prefix needs the
feature of the prefix's last token, so one feature is kept for each full block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.kv_cache.full_attention import PagedCache
from paceline.kv_cache.row_plan import blocks_for
from paceline.runtimes.base import FloatArray, IntArray, Network, RowRange
from paceline.speculation.drafter import RequestState
from paceline.speculation.request import Request

SPARE_BLOCKS = 64
"""Additional blocks for the feature pairs of draft tokens after the end of a sequence's last block."""

_STEP = np.uint64(0x9E3779B97F4A7C15)  # _STEP and HASH_FACTOR are odd, so that different tokens have different hashes mod 2**64
HASH_FACTOR = np.uint64(0xD1342543DE82EF95)
_STEP_INT, _WORD_MASK = int(_STEP), 0xFFFFFFFFFFFFFFFF


@dataclass(slots=True)
class _CachedPairs:
    """Which feature pairs of one request are in the cache: those of slots [first_slot, end_slot)."""

    sequence: CachedSequence
    first_slot: int
    end_slot: int
    num_observed: int  # number of positions whose features were received
    prefix_hash: int  # hash of the tokens before end_slot
    pending_features: list[FloatArray] = field(default_factory=list)  # features of positions end_slot - 1 to num_observed - 1


@dataclass(frozen=True, slots=True)
class TargetFeaturePairs:
    """Inputs of a pass for T consecutive slots: committed tokens with features that the target computed.

    Attributes:
        token_ids: [T] tokens.
        features: [T, F] the target's features of the positions before these tokens.
        rows: cache rows that keys and values are written to. The head's position of a feature pair is its slot - 1.
    """

    token_ids: IntArray
    features: FloatArray
    rows: RowRange


@dataclass(frozen=True, slots=True)
class RequestFeaturePairs(TargetFeaturePairs):
    """Target feature pairs that belong to a request."""

    request: Request


class FeaturePairCache:
    """KV cache of the feature pairs of all requests of one target.

    Args:
        runtime: the head's network; this class allocates its KV cache.
        cache: the target's KV cache.
        feature_size: F, number of values of a feature.
        window: maximum number of slots that a feature pair attends to, its own slot included.
        first_slot: first slot with a feature pair, 1 or 0. In slot 0 the first token of a text has a feature of zeros.
    """

    def __init__(self, runtime: Network, cache: KVCache, *, feature_size: int, window: int, first_slot: int = 1) -> None:
        num_blocks = cache.pool.num_blocks
        rows = [PagedCache(layer_cache.storage) for layer_cache in runtime.allocate_kv(num_blocks + SPARE_BLOCKS)]
        self.block_size = cache.block_size
        self.window, self._first_slot = window, first_slot
        self.bytes_per_token = (sum(one.num_bytes for one in rows) + feature_size * 4 * num_blocks) // max(1, cache.max_slots)
        self._spare_blocks = range(num_blocks, num_blocks + SPARE_BLOCKS)
        self._slot_hashes = np.zeros((1, num_blocks, self.block_size), np.uint64)
        self._features = np.zeros((num_blocks, feature_size), np.float32)
        self._feature_hashes = np.zeros(num_blocks, np.uint64)
        self._powers = np.cumprod(np.full(cache.max_slots + 1, HASH_FACTOR, np.uint64), dtype=np.uint64)
        self._hash_view, self._power_view = self._slot_hashes.data, self._powers.data  # memoryviews are faster to index than arrays
        self._pairs = RequestState[_CachedPairs]()
        for layer_cache in (*rows, PagedCache(self._slot_hashes)):
            cache.add_layer_cache(layer_cache)

    def append_features(self, request: Request, start: int, features: FloatArray) -> int:
        """Store the target's features [T, F] of positions `start`, `start` + 1, …; return how many slots can be computed now.

        For a new or restarted request, slots of a cached prefix count as computed.
        """
        end = start + len(features)
        pairs = self._pairs.get(request)
        if pairs is None or pairs.sequence is not request.cached_sequence or pairs.num_observed != start:
            pairs = self._pairs[request] = self._new_cached_pairs(request, start)
        pairs.pending_features.append(np.array(features, np.float32))
        pairs.num_observed = end
        self._store_block_features(request, start, features)
        return end - pairs.end_slot + 1

    def release(self, request: Request) -> None:
        """Drop the record of a request. Its keys and values remain usable for prefix hits until the target evicts the blocks."""
        self._pairs.pop(request)

    def pending_pairs(
        self, request: Request, *, include_root: bool, num_draft_rows: int = 0, num_used_spare_blocks: int = 0
    ) -> RequestFeaturePairs | None:
        """Return the feature pairs to compute next; None if there are none, features are missing, or no spare block is free.

        Args:
            include_root: include the last committed token, which the target has not run yet.
            num_draft_rows: number of cache rows to reserve for draft tokens after them.
            num_used_spare_blocks: number of spare blocks that other requests of the pass already use.
        """
        pairs = self._pairs.get(request)
        if pairs is None or (include_root and pairs.num_observed != len(request.token_ids) - 1):
            return None
        begin, end = pairs.end_slot, pairs.num_observed + include_root
        if end <= begin:
            return None
        table = request.cached_sequence.block_table
        missing = -(-(end + num_draft_rows) // self.block_size) - len(table)
        if missing > SPARE_BLOCKS - num_used_spare_blocks:
            return None
        if missing > 0:
            table = [*table, *self._spare_blocks[num_used_spare_blocks : num_used_spare_blocks + missing]]
        if len(pairs.pending_features) > 1:
            pairs.pending_features = [np.concatenate(pairs.pending_features)]
        rows = RowRange(0, end - begin, begin, np.array(table, np.int32), None, min(begin, max(pairs.first_slot, end - self.window)))
        token_ids = np.array(request.token_ids[begin:end], np.int32)
        return RequestFeaturePairs(token_ids, pairs.pending_features[0][: end - begin], rows, request)

    def mark_computed(self, request: Request, token_ids: Sequence[int] | IntArray) -> None:
        """Record that the slots of the next `token_ids` are computed. A last token in a spare block does not count: it will run again."""
        pairs = self._pairs[request]
        table, size = request.cached_sequence.block_table, self.block_size
        begin = pairs.end_slot
        end = min(begin + len(token_ids), len(table) * size)
        if end == begin:
            return
        prefix_hash, powers, slot_hashes = pairs.prefix_hash, self._power_view, self._hash_view
        for slot, token in zip(range(begin, end), token_ids, strict=False):  # for few tokens this is faster than `prefix_hashes`
            prefix_hash = ((int(token) + 1) * _STEP_INT * powers[slot] + prefix_hash) & _WORD_MASK
            slot_hashes[0, table[slot // size], slot % size] = prefix_hash
        pairs.prefix_hash, pairs.end_slot = prefix_hash, end
        if end > pairs.num_observed:  # the last committed token was included
            pairs.pending_features = []
        else:
            features = pairs.pending_features[0] if len(pairs.pending_features) == 1 else np.concatenate(pairs.pending_features)
            pairs.pending_features = [features[end - begin :]]

    def num_pending_pairs(self, request: Request) -> int:
        """Return how many slots can be computed now, that of the last committed token included."""
        pairs = self._pairs.get(request)
        return 0 if pairs is None else pairs.num_observed + 1 - pairs.end_slot

    def num_spare_blocks_needed(self, request: Request, num_draft_rows: int) -> int:
        """Return how many spare blocks the last committed token and `num_draft_rows` cache rows after it need."""
        end = len(request.token_ids) + num_draft_rows
        return max(0, blocks_for(end, self.block_size) - len(request.cached_sequence.block_table))

    def computed_slots(self, request: Request) -> range:
        """Return the slots of a request that are computed."""
        return range(self._pairs[request].first_slot, self._pairs[request].end_slot)

    def _new_cached_pairs(self, request: Request, start: int) -> _CachedPairs:
        if start == 0 and self._first_slot == 0:
            return _CachedPairs(request.cached_sequence, 0, 0, 0, 0, [np.zeros((1, self._features.shape[1]), np.float32)])
        if start == 0:
            return _CachedPairs(request.cached_sequence, 1, 1, 0, int(self._prefix_hashes(request.token_ids[:1], 0, 0)[0]))
        hashes = self._prefix_hashes(request.token_ids[: start + 1], 0, 0)
        table, size = request.cached_sequence.block_table, self.block_size
        block = table[start // size - 1]
        if start % size or self._feature_hashes[block] != hashes[start - 1]:
            return _CachedPairs(request.cached_sequence, start + 1, start + 1, start, int(hashes[start]))
        is_cached = self._slot_hashes[0, table[: start // size]].reshape(-1) == hashes[:start]
        is_cached[: self._first_slot] = False
        uncached = np.flatnonzero(~is_cached)
        first = int(uncached[-1]) + 1 if len(uncached) else 0  # slots from `first` to `start` are all cached
        return _CachedPairs(
            request.cached_sequence, first, start, start, int(hashes[start - 1]), [self._features[block : block + 1].copy()]
        )

    def _store_block_features(self, request: Request, start: int, features: FloatArray) -> None:
        """Store the feature of the last token of each full block, for requests that resume there."""
        size = self.block_size
        last = start + (size - 1 - start) % size
        if last >= start + len(features):
            return
        pairs = self._pairs[request]
        begin = pairs.end_slot
        later_hashes = self._prefix_hashes(request.token_ids[begin : start + len(features)], begin, pairs.prefix_hash)
        for position in range(last, start + len(features), size):
            block = request.cached_sequence.block_table[position // size]
            self._features[block] = features[position - start]
            self._feature_hashes[block] = pairs.prefix_hash if position < begin else later_hashes[position - begin]

    def _prefix_hashes(self, token_ids: Sequence[int], first: int, before: int) -> NDArray[np.uint64]:
        return prefix_hashes(token_ids, self._powers[first:], before)


def prefix_hashes(token_ids: Sequence[int], powers: NDArray[np.uint64], before: int) -> NDArray[np.uint64]:
    """Return for each token the hash of all tokens up to it, a polynomial of the tokens.

    Args:
        powers: powers of HASH_FACTOR: for each token that of its slot.
        before: hash of the tokens before `token_ids`; 0 = there are none.
    """
    values = (np.asarray(token_ids, np.uint64) + np.uint64(1)) * _STEP * powers[: len(token_ids)]
    values[:1] += np.uint64(before)
    return np.cumsum(values, dtype=np.uint64)
