"""Stores the states of recurrent layers: the last inputs of their convolutions, and the matrices of their recurrences.

A state has the same size for texts of any length. The stored state covers a prefix of the committed rows, whose length is a multiple of
`chunk_size`. Each later committed row is *pending*: a *replay record* stores the inputs of its state update. A pass first repeats the
updates of the pending rows, then computes its own rows, each from the state of its parent in the draft tree. So rejecting a draft token
only frees its record, and no state is copied.

A *checkpoint* is a copy of the state after a full block. Other sequences with the same prefix resume from it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CapacityError
from paceline.kv_cache.block_pool import BlockHash
from paceline.kv_cache.layer_cache import LayerCache
from paceline.kv_cache.row_plan import CommittedPath, RowPlan

MIN_PREFILL_ROWS_WITHOUT_RECORDS = 16
"""A pass with at least this many prefill rows writes the state after these rows instead of their replay records, because prefill rows are
never dropped one by one."""
NO_RECORD = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints are stored, and how many.

    Attributes:
        interval_rows: number of rows between checkpoints, a multiple of the block size. There are two more for each sequence: after the
            last full block of its prompt, and after its last full block.
        max_checkpoints: maximum number of checkpoints, beyond which the least recently used one is evicted; 0 = no checkpoints.
    """

    interval_rows: int = 512
    max_checkpoints: int = 16


CHECKPOINT_DEFAULTS = CheckpointConfig()


class StateUpdate(NamedTuple):
    """What a pass does with the state of one sequence: it replays the pending rows, then computes its own rows.

    Attributes:
        state: the stored state; None = zeros.
        records: [number of records, record_size], the replay records.
        pending_records: indices of the records of the pending rows, in order.
        num_applied_rows: how many of the pending rows the pass adds to `state` in place.
        row_records: for each row of the pass, the index of the record that it writes, or `NO_RECORD`.
        states_to_save: (count, target) in ascending order: write the state after `count` pending and prefill rows to array `target`.
        has_run: [1], 1 = the pass has applied its updates. It is an array, because the kernels write to it.
    """

    state: Any
    records: Any
    pending_records: Sequence[int]
    num_applied_rows: int
    row_records: Sequence[int]
    states_to_save: Sequence[tuple[int, Any]]
    has_run: NDArray[np.int32]


@dataclass(slots=True)
class _Checkpoint:
    """A state after a full block, from which other sequences resume.

    Attributes:
        length: number of rows that `state` covers.
        records: replay records of the rows from `length` to the end of the block; None = `state` covers the whole block.
        ends_in_prefill: whether the last row that `state` covers was a prefill row of a pass that wrote no records.
    """

    state: Any
    length: int
    records: Any = None
    ends_in_prefill: bool = False


@dataclass(slots=True)
class _SequenceState:
    """The state and the records of one sequence.

    Attributes:
        state, length: the state after the first `length` rows.
        records, pending_records, has_run: as in `StateUpdate`.
        free_records: indices of unused records.
        row_records, num_applied_rows: of the current pass, as in `StateUpdate`.
        num_unrecorded_rows: how many rows at the beginning of the current pass write no records.
        states_to_save: states that the current pass writes: (number of rows of the sequence that the state covers, target).
        block_hashes: hashes of full blocks that end after `length`, by block index.
        unregistered_checkpoints: checkpoints of blocks that have no hash yet, by block index.
        last_checkpoint: hash of the newest checkpoint, which the next one replaces; None = there is none, or it is at a multiple of
            the interval and is kept.
        last_checkpoint_ends_in_prefill: `ends_in_prefill` of the newest checkpoint. Only a checkpoint with the same value replaces it.
        is_consistent: False while `state`, `length` and `pending_records` change. After an interrupt during this, the state is not used.
    """

    state: Any = None
    length: int = 0
    records: Any = None
    pending_records: list[int] = field(default_factory=list)
    free_records: list[int] = field(default_factory=list)
    row_records: list[int] = field(default_factory=list)
    num_applied_rows: int = 0
    num_unrecorded_rows: int = 0
    states_to_save: list[tuple[int, Any]] = field(default_factory=list)
    has_run: NDArray[np.int32] = field(default_factory=lambda: np.zeros(1, np.int32))
    block_hashes: dict[int, BlockHash] = field(default_factory=dict)
    unregistered_checkpoints: dict[int, _Checkpoint] = field(default_factory=dict)
    last_checkpoint: BlockHash | None = None
    last_checkpoint_ends_in_prefill: bool = False
    is_consistent: bool = True

    def clear_plan(self) -> None:
        self.row_records, self.num_unrecorded_rows, self.num_applied_rows = [], 0, 0


class RecurrentStateCache(LayerCache):
    """A layer cache with the states of all recurrent layers of a network.

    Args:
        state_size, record_size: how many numbers a state and a replay record have.
        allocate: returns an array of zeros of a given shape, of the runtime's array type.
        chunk_size: stored states cover prefixes of a multiple of `chunk_size` rows. It divides `block_size`, and is at most
            `MIN_PREFILL_ROWS_WITHOUT_RECORDS`.
    """

    def __init__(
        self,
        state_size: int,
        record_size: int,
        block_size: int,
        allocate: Callable[[tuple[int, ...]], Any],
        config: CheckpointConfig,
        chunk_size: int = 1,
    ) -> None:
        self.config, self._chunk_size = config, chunk_size
        self.state_size, self.record_size = state_size, record_size
        self._block_size, self._allocate = block_size, allocate
        self._sequences: dict[int, _SequenceState] = {}
        self._spare_states: list[Any] = []
        self._checkpoints: OrderedDict[BlockHash, _Checkpoint] = OrderedDict()  # least recently used first

    @property
    def num_bytes(self) -> int:
        records = [*(one.records for one in self._sequences.values()), *(one.records for one in self._checkpoints.values())]
        return sum(int(array.nbytes) for array in (*self._all_states(), *records) if array is not None)

    def plan_update(self, sequence_id: int) -> StateUpdate:
        """Return the state update of the pass whose rows are reserved. If it runs a second time, rows that it has applied are left out."""
        sequence = self._sequences[sequence_id]
        self._finish_pass(sequence)
        saves = [(end - sequence.length, state) for end, state in sequence.states_to_save]
        pending, rows, has_run = sequence.pending_records, sequence.row_records, sequence.has_run
        return StateUpdate(sequence.state, sequence.records, pending, sequence.num_applied_rows, rows, saves, has_run)

    def reserve_rows(self, plan: RowPlan) -> None:
        """Allocate replay records, and memory for the states that the pass writes.

        Raises:
            CapacityError: there is no memory for another state; nothing was changed.
        """
        sequence = self._sequences.setdefault(plan.sequence_id, _SequenceState())
        self._finish_pass(sequence)
        start = plan.committed_len
        if not sequence.is_consistent or sequence.length + len(sequence.pending_records) != start:
            raise RuntimeError(f"the state of a sequence does not cover its {start} committed rows")
        pinned_len = start if plan.pinned_len is None else plan.pinned_len
        num_unrecorded_rows = num_applied_rows = 0
        if plan.num_prefill_rows >= MIN_PREFILL_ROWS_WITHOUT_RECORDS and pinned_len == start:
            num_unrecorded_rows = max(0, self._round_down_to_chunk(start + plan.num_prefill_rows) - start)
        try:
            if num_unrecorded_rows:
                self._allocate_states_to_save(sequence, start + num_unrecorded_rows, includes_last=True)
            else:
                num_applied_rows = self._round_down_to_chunk(min(max(0, pinned_len - sequence.length), len(sequence.pending_records)))
                if sequence.state is None:
                    sequence.state = self._new_state(is_zero=True)
                self._allocate_states_to_save(sequence, sequence.length + num_applied_rows)
            rows = self._allocate_records(sequence, plan.num_rows - num_unrecorded_rows)
        except MemoryError as error:
            self._free_states_to_save(sequence)
            raise CapacityError("there is no memory for the states of recurrent layers: lower max_num_seqs") from error
        sequence.num_applied_rows, sequence.num_unrecorded_rows = num_applied_rows, num_unrecorded_rows
        sequence.row_records = [NO_RECORD] * num_unrecorded_rows + rows

    def keep_path(self, plan: RowPlan, path: CommittedPath) -> None:
        sequence = self._sequences[plan.sequence_id]
        self._finish_pass(sequence)
        num_unrecorded_rows, kept = sequence.num_unrecorded_rows, [sequence.row_records[row] for row in path.rows]
        if num_unrecorded_rows > len(kept):
            raise RuntimeError(f"{len(kept)} of {num_unrecorded_rows} prefill rows are to be kept: they are kept or dropped together")
        kept = kept[num_unrecorded_rows:]
        sequence.is_consistent = False
        before = sequence.pending_records
        if num_unrecorded_rows:
            (_, state), replaced = sequence.states_to_save.pop(), sequence.state
            sequence.state, sequence.length, sequence.pending_records = state, plan.committed_len + num_unrecorded_rows, kept
            self._recycle_state(replaced)
            self._store_saved_states(sequence)
            sequence.free_records += before
        else:
            sequence.pending_records = before + kept
        sequence.free_records += [record for record in sequence.row_records if record != NO_RECORD and record not in kept]
        sequence.clear_plan()
        sequence.is_consistent = True

    def drop_reserved_rows(self, plan: RowPlan) -> None:
        sequence = self._sequences.get(plan.sequence_id)
        if sequence is not None:
            self._finish_pass(sequence)
            sequence.free_records += [record for record in sequence.row_records if record != NO_RECORD]
            sequence.clear_plan()
            self._free_states_to_save(sequence)

    def can_truncate(self, sequence_id: int, length: int) -> bool:
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._finish_pass(sequence)
        return length == 0 or (sequence is not None and sequence.length <= length <= sequence.length + len(sequence.pending_records))

    def num_resumable_blocks(self, block_hashes: Sequence[BlockHash]) -> int:
        return next((count for count in range(len(block_hashes), 0, -1) if block_hashes[count - 1] in self._checkpoints), 0)

    def resume(self, sequence_id: int, length: int, block_hashes: Sequence[BlockHash]) -> None:
        if length == 0:
            self.release_sequence(sequence_id)
        elif self.can_truncate(sequence_id, length):
            sequence = self._sequences[sequence_id]
            sequence.free_records += sequence.pending_records[length - sequence.length :]
            del sequence.pending_records[length - sequence.length :]
            for index in [index for index in sequence.block_hashes if (index + 1) * self._block_size > length]:
                del sequence.block_hashes[index]
        else:
            block_hash = block_hashes[length // self._block_size - 1]
            self._checkpoints.move_to_end(block_hash)
            checkpoint = self._checkpoints[block_hash]
            try:
                state = self._new_state()
                state[...] = checkpoint.state
            except MemoryError:  # there is no memory for a copy: give the checkpoint's state to the sequence
                state = self._checkpoints.pop(block_hash).state
            sequence = _SequenceState(state, checkpoint.length)
            if checkpoint.records is not None:
                sequence.pending_records = self._allocate_records(sequence, len(checkpoint.records))
                sequence.records[sequence.pending_records] = checkpoint.records
            self.release_sequence(sequence_id)
            self._sequences[sequence_id] = sequence

    def register_prefix(self, sequence_id: int, first_index: int, block_hashes: Sequence[BlockHash]) -> None:
        sequence = self._sequences[sequence_id]
        for index, block_hash in enumerate(block_hashes, first_index):
            if index in sequence.unregistered_checkpoints:
                self._store_checkpoint(sequence, index, block_hash, sequence.unregistered_checkpoints.pop(index))
            elif (index + 1) * self._block_size > sequence.length:
                sequence.block_hashes[index] = block_hash
        for index in list(sequence.unregistered_checkpoints):  # their hashes are not known, so no lookup could find them
            self._recycle_state(sequence.unregistered_checkpoints.pop(index).state)

    def evict(self, block_hash: BlockHash) -> None:
        self._evict_checkpoint(block_hash)
        for sequence in self._sequences.values():
            for index in [index for index, own in sequence.block_hashes.items() if own == block_hash]:
                del sequence.block_hashes[index]

    def release_sequence(self, sequence_id: int) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self._finish_pass(sequence)
            self._free_states_to_save(sequence)
            self._store_last_checkpoint(sequence)
            for state in (sequence.state, *(checkpoint.state for checkpoint in sequence.unregistered_checkpoints.values())):
                self._recycle_state(state)

    def _round_down_to_chunk(self, length: int) -> int:
        return length // self._chunk_size * self._chunk_size

    def _all_states(self) -> Iterator[Any]:
        yield from self._spare_states
        yield from (checkpoint.state for checkpoint in self._checkpoints.values())
        for sequence in self._sequences.values():
            if sequence.state is not None:
                yield sequence.state
            yield from (checkpoint.state for checkpoint in sequence.unregistered_checkpoints.values())
            yield from (state for _, state in sequence.states_to_save)

    def _finish_pass(self, sequence: _SequenceState) -> None:
        """If the pass has run, free the records of the rows that it applied, and store the states that it wrote as checkpoints."""
        if sequence.has_run[0]:
            sequence.is_consistent = False
            count, sequence.num_applied_rows = sequence.num_applied_rows, 0
            sequence.has_run[0] = 0
            sequence.length += count
            sequence.free_records += sequence.pending_records[:count]
            del sequence.pending_records[:count]
            sequence.is_consistent = True
            if not sequence.num_unrecorded_rows:
                self._store_saved_states(sequence)

    def _store_saved_states(self, sequence: _SequenceState) -> None:
        """Turn the states that the pass has written into checkpoints."""
        saves, sequence.states_to_save = sequence.states_to_save, []
        for end, state in saves:
            index = end // self._block_size - 1
            block_hash = sequence.block_hashes.get(index)
            checkpoint = _Checkpoint(state, end, ends_in_prefill=sequence.num_unrecorded_rows > 0)
            if block_hash is None:
                sequence.unregistered_checkpoints[index] = checkpoint
            else:
                self._store_checkpoint(sequence, index, block_hash, checkpoint)
        for index in [index for index in sequence.block_hashes if (index + 1) * self._block_size <= sequence.length]:
            del sequence.block_hashes[index]

    def _allocate_states_to_save(self, sequence: _SequenceState, length: int, *, includes_last: bool = False) -> None:
        """Allocate arrays for checkpoints after up to `length` rows and, if `includes_last`, for the state after `length` rows."""
        size = self._block_size
        if self.config.max_checkpoints:
            ends = list(range((sequence.length // size + 1) * size, length + 1, size))
            for block_end in ends:
                if block_end % self.config.interval_rows == 0 or block_end == ends[-1]:
                    sequence.states_to_save.append((block_end, self._new_state()))
        if includes_last:
            sequence.states_to_save.append((length, self._new_state()))

    def _free_states_to_save(self, sequence: _SequenceState) -> None:
        while sequence.states_to_save:
            self._recycle_state(sequence.states_to_save.pop()[1])

    def _store_checkpoint(self, sequence: _SequenceState, index: int, block_hash: BlockHash, checkpoint: _Checkpoint) -> None:
        """Store the checkpoint after block `index`; evict the sequence's previous one, unless that is at a multiple of the interval."""
        if block_hash in self._checkpoints or not self.config.max_checkpoints:
            self._recycle_state(checkpoint.state)
            return
        if sequence.last_checkpoint is not None and checkpoint.ends_in_prefill == sequence.last_checkpoint_ends_in_prefill:
            self._evict_checkpoint(sequence.last_checkpoint)
        while len(self._checkpoints) >= self.config.max_checkpoints:
            self._evict_checkpoint(next(iter(self._checkpoints)))
        self._checkpoints[block_hash] = checkpoint
        sequence.last_checkpoint = None if (index + 1) * self._block_size % self.config.interval_rows == 0 else block_hash
        sequence.last_checkpoint_ends_in_prefill = checkpoint.ends_in_prefill

    def _store_last_checkpoint(self, sequence: _SequenceState) -> None:
        """Store the state of a released sequence, and records up to the end of its last full block, as a checkpoint after that block."""
        index = (sequence.length + len(sequence.pending_records)) // self._block_size - 1
        count, block_hash = (index + 1) * self._block_size - sequence.length, sequence.block_hashes.get(index)
        if not sequence.is_consistent or count < 1 or block_hash is None:
            return
        try:
            records = self._allocate((count, self.record_size))
        except MemoryError:
            return
        records[...] = sequence.records[sequence.pending_records[:count]]
        checkpoint, sequence.state = _Checkpoint(sequence.state, sequence.length, records), None
        self._store_checkpoint(sequence, index, block_hash, checkpoint)

    def _evict_checkpoint(self, block_hash: BlockHash) -> None:
        if block_hash in self._checkpoints:
            self._recycle_state(self._checkpoints.pop(block_hash).state)

    def _new_state(self, *, is_zero: bool = False) -> Any:
        if not self._spare_states:
            return self._allocate((self.state_size,))
        state = self._spare_states.pop()
        if is_zero:
            state[...] = 0
        return state

    def _recycle_state(self, state: Any) -> None:
        if state is not None:
            self._spare_states.append(state)

    def _allocate_records(self, sequence: _SequenceState, count: int) -> list[int]:
        """Return the indices of `count` unused records; allocate more if there are too few."""
        size = 0 if sequence.records is None else len(sequence.records)
        if count > len(sequence.free_records):
            grown = max(2 * size, size + count - len(sequence.free_records), 4)
            records = self._allocate((grown, self.record_size))
            if size:
                records[:size] = sequence.records
            sequence.records = records
            sequence.free_records += range(size, grown)
        return [sequence.free_records.pop() for _ in range(count)]
