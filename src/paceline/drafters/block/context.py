"""Cache of a block drafter's context: keys and values computed from the target's hidden states.

Context row t depends on the tokens up to position t, as the target's own cache row t does. So both use the same block and slot
(`HeadCache`). Missing rows are not attended to.
"""

import numpy as np

from paceline.drafters.block.network import PendingContext
from paceline.drafters.head_cache import HeadCache, HeadSlots
from paceline.runtimes.base import FloatArray, RowRange
from paceline.speculation.request import Request


class ContextCache(HeadCache):
    """Context keys and values of the committed positions of all requests of one target."""

    def append_hidden_states(self, request: Request, start: int, hidden_states: FloatArray) -> int:
        """Store the target's hidden states [T, F] of positions `start`, `start` + 1, …; return how many positions lack context rows."""
        slots = self._add_hidden_states(request, start, hidden_states)
        return slots.num_observed_positions - slots.end_slot

    def pending_context(self, request: Request) -> PendingContext | None:
        """Return the committed positions whose context keys and values are not computed yet; None if there are none."""
        slots = self._slots.get(request)
        if slots is None or slots.end_slot == slots.num_observed_positions:
            return None
        table = np.array(request.cached_sequence.block_table, np.int32)
        rows = RowRange(0, self.num_pending(request), slots.end_slot, table, None, min(slots.end_slot, slots.first_slot))
        return PendingContext(slots.join_pending(), rows)

    def drop_oldest_pending(self, request: Request, num_kept: int) -> None:
        """Drop all pending positions but the last `num_kept`. Later drafts attend neither to dropped positions nor to those before them."""
        slots = self._slots.get(request)
        if slots is None or slots.num_observed_positions - slots.end_slot <= num_kept:
            return
        num_dropped = slots.num_observed_positions - num_kept - slots.end_slot
        self._advance_end(request, slots, request.token_ids[slots.end_slot : slots.end_slot + num_dropped], is_computed=False)
        slots.first_slot = slots.end_slot
        while num_dropped >= len(slots.pending_hidden_states[0]):
            num_dropped -= len(slots.pending_hidden_states.pop(0))
        slots.pending_hidden_states[0] = slots.pending_hidden_states[0][num_dropped:].copy()  # a view would keep the dropped rows in memory

    def mark_computed(self, request: Request) -> None:
        """Record that the keys and values of all pending positions are now cached."""
        slots = self._slots[request]
        self._advance_end(request, slots, request.token_ids[slots.end_slot : slots.num_observed_positions])
        slots.pending_hidden_states = []

    def draft_row_range(self, request: Request, num_rows: int, num_used_spare_blocks: int) -> RowRange | None:
        """Return the cache rows for a draft; None if context rows of the request are missing or spare blocks run out.

        Args:
            num_rows: rows of the draft, the row of the last committed token included.
            num_used_spare_blocks: number of spare blocks that other requests of the pass already use.
        """
        slots, last_position = self._slots.get(request), len(request.token_ids) - 1
        if slots is None or slots.end_slot != last_position:
            return None
        table = self._table_up_to(request, last_position + num_rows, num_used_spare_blocks)
        if table is None:
            return None
        first = min(last_position, max(slots.first_slot, last_position + num_rows - self.window))
        return RowRange(0, num_rows, last_position, table, np.ones((num_rows, num_rows), np.bool_), first)

    def has_all_hidden_states(self, request: Request) -> bool:
        """Return whether hidden states of all tokens of the request but the last have been received."""
        slots, last_position = self._slots.get(request), len(request.token_ids) - 1
        return slots is not None and slots.num_observed_positions == last_position and slots.sequence is request.cached_sequence

    def num_pending(self, request: Request) -> int:
        """Return the number of committed positions without context rows."""
        slots = self._slots.get(request)
        return 0 if slots is None else slots.num_observed_positions - slots.end_slot

    def _create_slots(self, request: Request, start: int) -> HeadSlots:
        if start == 0:
            return HeadSlots(request.cached_sequence, 0, 0, 0, 0)
        hashes = self._hash_tokens(request.token_ids[:start], 0, 0)
        return HeadSlots(request.cached_sequence, self._first_computed_slot(request, hashes), start, start, int(hashes[-1]))
