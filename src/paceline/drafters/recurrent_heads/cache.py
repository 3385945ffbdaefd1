"""Key-value rows of a head's true pairs, in the target's blocks.

A head with attention pairs token s with the target's feature of position s - 1. The pair depends only on the tokens up to s, as does the
target's row of token s. So both have the same slot of the same block, and copies, forks, prefix sharing and eviction are right for both:

    slot                 0     1        2        …   n
    the target's row     x_0   x_1      x_2          x_n (the root, pending)
    the head's pair      -     x_1 f_0  x_2 f_1      x_n f_(n-1)      then drafted pairs, dropped afterwards

Slot 0 has no pair and is never attended to. Each slot has a hash of the tokens up to it: a sequence that matches a prefix thus finds which
of its pairs were computed. The first pair after a matched prefix needs the feature of the prefix's last token, so one feature is kept for
every full block.
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
"""The head's own blocks, for drafted rows beyond a sequence's blocks."""

_STEP = np.uint64(0x9E3779B97F4A7C15)  # odd, like _FACTOR, so that a different token always changes the hash
_FACTOR = np.uint64(0xD1342543DE82EF95)
_STEP_NUMBER, _WORD = int(_STEP), 0xFFFFFFFFFFFFFFFF


@dataclass(slots=True)
class _RequestPairs:
    """One request's pairs: slots [first, num_pairs) are computed; features of positions num_pairs - 1 … num_seen - 1 are pending."""

    sequence: CachedSequence
    first: int
    num_pairs: int
    num_seen: int  # number of positions whose features were received
    prefix_hash: int  # hash of the tokens before slot num_pairs
    pending: list[FloatArray] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TruePairs:
    """True pairs to run: pairs with features of the target.

    Attributes:
        token_ids: [T] tokens of the pairs.
        features: [T, F] features of the positions before them.
        rows: their slots; the position of a pair is its slot less 1.
    """

    token_ids: IntArray
    features: FloatArray
    rows: RowRange


@dataclass(frozen=True, slots=True)
class RequestTruePairs(TruePairs):
    """True pairs of one request."""

    request: Request


class PairCache:
    """The pairs of all requests of one target.

    Args:
        runtime: the head's network; its keys and values are stored here.
        cache: the target's.
        feature_size: F, values of a feature.
        window: slots that a pair may attend to, itself included.
    """

    def __init__(self, runtime: Network, cache: KVCache, *, feature_size: int, window: int) -> None:
        num_blocks = cache.pool.num_blocks
        rows = [PagedCache(layer_cache.storage) for layer_cache in runtime.allocate_kv(num_blocks + SPARE_BLOCKS)]
        self.block_size = cache.block_size
        self.window = window
        self.bytes_per_token = (sum(one.num_bytes for one in rows) + feature_size * 4 * num_blocks) // max(1, cache.max_slots)
        self._spares = range(num_blocks, num_blocks + SPARE_BLOCKS)
        self._slot_hashes = np.zeros((1, num_blocks, self.block_size), np.uint64)
        self._features = np.zeros((num_blocks, feature_size), np.float32)
        self._feature_hashes = np.zeros(num_blocks, np.uint64)
        self._powers = np.cumprod(np.full(cache.max_slots + 1, _FACTOR, np.uint64), dtype=np.uint64)
        self._hash_view, self._power_view = self._slot_hashes.data, self._powers.data  # memoryviews are faster to index than arrays
        self._pairs = RequestState[_RequestPairs]()
        for layer_cache in (*rows, PagedCache(self._slot_hashes)):
            cache.add_layer_cache(layer_cache)

    def append_features(self, request: Request, start: int, features: FloatArray) -> int:
        """Append the target's features [T, F] of positions `start` …; return the number of pending pairs.

        A new or restarted request keeps the pairs that were already computed for its prefix.
        """
        end = start + len(features)
        pairs = self._pairs.get(request)
        if pairs is None or pairs.sequence is not request.sequence or pairs.num_seen != start:
            pairs = self._pairs[request] = self._new_request_pairs(request, start)
        pairs.pending.append(np.array(features, np.float32))
        pairs.num_seen = end
        self._store_block_features(request, start, features)
        return end - pairs.num_pairs + 1

    def release(self, request: Request) -> None:
        """Drop a request; its rows stay as long as the target's."""
        self._pairs.pop(request)

    def pending_pairs(
        self, request: Request, *, with_root: bool, num_draft_rows: int = 0, num_used_spare_blocks: int = 0
    ) -> RequestTruePairs | None:
        """Return the pairs that can be computed now; None if there are none, features are missing, or no spare block is left.

        Args:
            with_root: include the pair of the request's last token, whose slot the target has not written yet.
            num_draft_rows: drafted rows that will follow.
            num_used_spare_blocks: spare blocks that other requests of the pass use.
        """
        pairs = self._pairs.get(request)
        if pairs is None or (with_root and pairs.num_seen != len(request.token_ids) - 1):
            return None
        begin, end = pairs.num_pairs, pairs.num_seen + with_root
        if end <= begin:
            return None
        table = request.sequence.block_table
        missing = -(-(end + num_draft_rows) // self.block_size) - len(table)
        if missing > SPARE_BLOCKS - num_used_spare_blocks:
            return None
        if missing > 0:
            table = [*table, *self._spares[num_used_spare_blocks : num_used_spare_blocks + missing]]
        if len(pairs.pending) > 1:
            pairs.pending = [np.concatenate(pairs.pending)]
        rows = RowRange(0, end - begin, begin, np.array(table, np.int32), None, min(begin, max(pairs.first, end - self.window)))
        return RequestTruePairs(np.array(request.token_ids[begin:end], np.int32), pairs.pending[0][: end - begin], rows, request)

    def mark_computed(self, request: Request, token_ids: Sequence[int] | IntArray) -> None:
        """Mark the pairs of these tokens, the first pending ones, as computed. A root's pair in a spare block will run again."""
        pairs = self._pairs[request]
        table, size = request.sequence.block_table, self.block_size
        begin = pairs.num_pairs
        end = min(begin + len(token_ids), len(table) * size)
        if end == begin:
            return
        prefix_hash, powers, slot_hashes = pairs.prefix_hash, self._power_view, self._hash_view
        for slot, token in zip(range(begin, end), token_ids, strict=False):  # same hash as `_prefix_hashes`, but faster for a few tokens
            prefix_hash = ((int(token) + 1) * _STEP_NUMBER * powers[slot] + prefix_hash) & _WORD
            slot_hashes[0, table[slot // size], slot % size] = prefix_hash
        pairs.prefix_hash, pairs.num_pairs = prefix_hash, end
        if end > pairs.num_seen:  # the pair of the root was the last one
            pairs.pending = []
        else:
            features = pairs.pending[0] if len(pairs.pending) == 1 else np.concatenate(pairs.pending)
            pairs.pending = [features[end - begin :]]

    def num_pending_pairs(self, request: Request) -> int:
        """Return the number of pairs that can be computed now, the root's included."""
        pairs = self._pairs.get(request)
        return 0 if pairs is None else pairs.num_seen + 1 - pairs.num_pairs

    def num_spare_blocks(self, request: Request, num_draft_rows: int) -> int:
        """Return the number of spare blocks that a root and `num_draft_rows` rows after it need."""
        end = len(request.token_ids) + num_draft_rows
        return max(0, blocks_for(end, self.block_size) - len(request.sequence.block_table))

    def first_pair_slot(self, request: Request) -> int:
        """Return the first slot of a request whose pair can be attended to."""
        return self._pairs[request].first

    def num_pairs(self, request: Request) -> int:
        """Return the end of the range of slots whose pairs are computed."""
        return self._pairs[request].num_pairs

    def _new_request_pairs(self, request: Request, start: int) -> _RequestPairs:
        if start == 0:
            return _RequestPairs(request.sequence, 1, 1, 0, int(self._prefix_hashes(request.token_ids[:1], 0, 0)[0]))
        hashes = self._prefix_hashes(request.token_ids[: start + 1], 0, 0)
        table, size = request.sequence.block_table, self.block_size
        block = table[start // size - 1]
        if start % size or self._feature_hashes[block] != hashes[start - 1]:
            return _RequestPairs(request.sequence, start + 1, start + 1, start, int(hashes[start]))
        known = self._slot_hashes[0, table[: start // size]].reshape(-1) == hashes[:start]
        known[0] = False
        first = start - int(np.argmin(known[::-1]))  # first slot of the computed pairs that reach the end; slot 0 has no pair
        return _RequestPairs(request.sequence, first, start, start, int(hashes[start - 1]), [self._features[block : block + 1].copy()])

    def _store_block_features(self, request: Request, start: int, features: FloatArray) -> None:
        """Store the feature of the last token of each full block, for requests that resume there."""
        size = self.block_size
        last = start + (size - 1 - start) % size
        if last >= start + len(features):
            return
        pairs = self._pairs[request]
        begin = pairs.num_pairs
        later = self._prefix_hashes(request.token_ids[begin : start + len(features)], begin, pairs.prefix_hash)
        for position in range(last, start + len(features), size):
            block = request.sequence.block_table[position // size]
            self._features[block] = features[position - start]
            self._feature_hashes[block] = pairs.prefix_hash if position < begin else later[position - begin]  # `begin` is not hashed

    def _prefix_hashes(self, token_ids: Sequence[int] | IntArray, first: int, before: int) -> NDArray[np.uint64]:
        """Return the hashes of slots `first` …: a polynomial of all tokens up to each."""
        values = (np.asarray(token_ids, np.uint64) + np.uint64(1)) * _STEP * self._powers[first : first + len(token_ids)]
        values[:1] += np.uint64(before)
        return np.cumsum(values, dtype=np.uint64)
