"""Reserving cache slots for the rows of a pass; guesses give way where blocks are short."""

from collections.abc import Sequence

from paceline.errors import CapacityError
from paceline.kv_cache.paged import KVCache
from paceline.kv_cache.row_plan import RowPlan
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import PlainReason


def reserve(batch: Sequence[RequestRows], cache: KVCache) -> list[RowPlan]:
    """Reserve slots for all rows. Guesses that find no block, or take one that known tokens need, are cut; the best stay.

    Raises:
        CapacityError: not even the known tokens fit; nothing was changed.
    """
    try:
        for rows in batch:
            try:
                rows.plan = cache.reserve(rows.request.sequence, rows.parents, rows.num_known)
            except CapacityError:
                # Guesses of others may hold the blocks that known tokens need.
                _free_blocks(batch, cache, cache.num_needed(rows.request.sequence, range(-1, rows.num_known - 1)))
                _trim(rows, cache, cache.pool.num_free)
                rows.plan = cache.reserve(rows.request.sequence, rows.parents, rows.num_known)
    except CapacityError:
        for rows in batch:
            cache.cancel(rows.request.sequence)
        raise
    return [rows.plan for rows in batch if rows.plan is not None]


def _free_blocks(batch: Sequence[RequestRows], cache: KVCache, num_blocks: int) -> None:
    """Cut guesses that have slots already, the last request's first, until `num_blocks` are free or no guess is left."""
    for rows in reversed(batch):
        if cache.pool.num_free >= num_blocks:
            return
        if rows.plan is not None and rows.num_guesses > 0:
            cache.cancel(rows.request.sequence)
            _trim(rows, cache, cache.pool.num_free - num_blocks)
            rows.plan = cache.reserve(rows.request.sequence, rows.parents, rows.num_known)


def _trim(rows: RequestRows, cache: KVCache, num_blocks: int) -> None:
    """Keep the guesses that fit `num_blocks` blocks."""
    tree = rows.tree
    if tree is None or tree.num_draft_tokens == 0:
        return
    sequence = rows.request.sequence
    kept = tree.prune(lambda parents: cache.num_needed(sequence, rows.parents_with(parents)) <= num_blocks)
    rows.set_guesses(kept, tree.num_draft_tokens, PlainReason.NO_MEMORY)
