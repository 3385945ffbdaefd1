"""Checks of what layer caches with blocks or states of their own hold."""

from paceline.kv_cache.recurrent_state import NO_RECORD, RecurrentStateCache
from paceline.kv_cache.sliding_window import SlidingWindowCache


def check_window(cache: SlidingWindowCache) -> None:
    """The pool matches the block tables."""
    cache.pool.check_consistency(table.blocks[table.first : table.end].tolist() for table in cache._tables.values())


def check_states(cache: RecurrentStateCache) -> None:
    """Each record has exactly one use, and each state exactly one owner."""
    for sequence in cache._sequences.values():
        records = sorted(
            [*sequence.pending_records, *sequence.free_records, *(record for record in sequence.row_records if record != NO_RECORD)]
        )
        assert records == list(range(0 if sequence.records is None else len(sequence.records)))
    owned = [id(state) for state in cache._all_states()]
    assert len(set(owned)) == len(owned)
