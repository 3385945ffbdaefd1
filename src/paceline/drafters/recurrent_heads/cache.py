"""KV cache of a head's feature pairs. The head's input at slot s is token x_s and the target's feature f_(s-1) of the position before it:

    slot                       0     1        2        …   n
    input of the target        x_0   x_1      x_2          x_n, the last committed token, which the target has not run yet
    input of the head          -     x_1 f_0  x_2 f_1      x_n f_(n-1), then the feature pairs of draft tokens, dropped after the draft

Slot 0 has no feature pair and is never attended to; only for PARD-2 draft models it has one, with a feature of zeros. The first feature
pair after a prefix hit needs the feature of the prefix's last token, so one feature is kept for each full block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.drafters.head_cache import HeadCache, HeadSlots
from paceline.kv_cache.cache import KVCache
from paceline.runtimes.base import FloatArray, IntArray, Network, RowRange
from paceline.speculation.request import Request


@dataclass(frozen=True, slots=True)
class TargetFeaturePairs:
    """Inputs of a pass for T consecutive slots: committed tokens with features that the target computed."""

    token_ids: IntArray  # [T] tokens
    features: FloatArray  # [T, F] the target's features of the positions before these tokens
    rows: RowRange  # cache rows that keys and values are written to; the head's position of a feature pair is its slot - 1


@dataclass(frozen=True, slots=True)
class RequestFeaturePairs(TargetFeaturePairs):
    """Feature pairs of one request, with features that the target computed."""

    request: Request


class FeaturePairCache(HeadCache):
    """KV cache of the feature pairs of all requests of one target.

    Args:
        runtime, cache, window: see `HeadCache`.
        feature_size: F, number of values of a feature.
        first_slot: first slot with a feature pair, 1 or 0. In slot 0 the first token of a text has a feature of zeros.
    """

    def __init__(self, runtime: Network, cache: KVCache, *, feature_size: int, window: int, first_slot: int = 1) -> None:
        super().__init__(runtime, cache, window=window)
        num_blocks, self._first_slot = cache.pool.num_blocks, first_slot
        self.bytes_per_token += feature_size * 4 * num_blocks // max(1, cache.max_slots)
        self._features = np.zeros((num_blocks, feature_size), np.float32)
        self._feature_hashes = np.zeros(num_blocks, np.uint64)

    def append_features(self, request: Request, start: int, features: FloatArray) -> int:
        """Store the target's features [T, F] of positions `start`, `start` + 1, …; return how many slots can be computed now.

        For a new or restarted request, slots of a cached prefix count as computed.
        """
        slots = self._add_hidden_states(request, start, np.array(features, np.float32))
        self._store_block_features(request, slots, start, features)
        return slots.num_observed_positions - slots.end_slot + 1

    def pending_pairs(
        self, request: Request, *, include_root: bool, num_draft_rows: int = 0, num_used_spare_blocks: int = 0
    ) -> RequestFeaturePairs | None:
        """Return the feature pairs to compute next; None if there are none, features are missing, or no spare block is free.

        Args:
            include_root: include the last committed token, which the target has not run yet.
            num_draft_rows: number of cache rows to reserve for draft tokens after the feature pairs.
            num_used_spare_blocks: number of spare blocks that other requests of the pass already use.
        """
        slots = self._slots.get(request)
        if slots is None or (include_root and slots.num_observed_positions != len(request.token_ids) - 1):
            return None
        begin, end = slots.end_slot, slots.num_observed_positions + include_root
        table = self._table_up_to(request, end + num_draft_rows, num_used_spare_blocks) if end > begin else None
        if table is None:
            return None
        rows = RowRange(0, end - begin, begin, table, None, min(begin, max(slots.first_slot, end - self.window)))
        return RequestFeaturePairs(np.array(request.token_ids[begin:end], np.int32), slots.join_pending()[: end - begin], rows, request)

    def mark_computed(self, request: Request, token_ids: Sequence[int] | IntArray) -> None:
        """Record that the slots of the next `token_ids` are computed. Slots in spare blocks do not count: they will run again."""
        slots = self._slots[request]
        count = min(len(token_ids), len(request.cached_sequence.block_table) * self.block_size - slots.end_slot)
        if count > 0:
            self._advance_end(request, slots, token_ids[:count])
            # if this includes the last committed token, no features are left
            slots.pending_hidden_states = [] if slots.end_slot > slots.num_observed_positions else [slots.join_pending()[count:]]

    def num_pending_pairs(self, request: Request) -> int:
        """Return how many feature pairs can be run now, including the one of the last committed token."""
        slots = self._slots.get(request)
        return 0 if slots is None else slots.num_observed_positions + 1 - slots.end_slot

    def _create_slots(self, request: Request, start: int) -> HeadSlots:
        sequence = request.cached_sequence
        if start == 0 and self._first_slot == 0:
            return HeadSlots(sequence, 0, 0, 0, 0, [np.zeros((1, self._features.shape[1]), np.float32)])
        hashes = self._hash_tokens(request.token_ids[: start + 1], 0, 0)
        block = None if start % self.block_size or start == 0 else sequence.block_table[start // self.block_size - 1]
        if block is None or self._feature_hashes[block] != hashes[start - 1]:
            return HeadSlots(sequence, start + 1, start + 1, start, int(hashes[start]))
        first = max(self._first_slot, self._first_computed_slot(request, hashes[:start]))
        return HeadSlots(sequence, first, start, start, int(hashes[start - 1]), [self._features[block : block + 1].copy()])

    def _store_block_features(self, request: Request, slots: HeadSlots, start: int, features: FloatArray) -> None:
        """Store the feature of the last token of each full block, for requests that resume there."""
        size, end = self.block_size, start + len(features)
        last = start + (size - 1 - start) % size
        if last >= end:
            return
        later_hashes = self._hash_tokens(request.token_ids[slots.end_slot : end], slots.end_slot, slots.prefix_hash)
        for position in range(last, end, size):
            block = request.cached_sequence.block_table[position // size]
            self._features[block] = features[position - start]
            self._feature_hashes[block] = slots.prefix_hash if position < slots.end_slot else later_hashes[position - slots.end_slot]
