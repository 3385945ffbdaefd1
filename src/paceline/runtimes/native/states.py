"""What a pass does to the states of sequences, as kernels/native.h wants it."""

from dataclasses import dataclass
from functools import lru_cache
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache.recurrent import RecurrentStates, StateWork
from paceline.runtimes.base import BoolArray, ForwardBatch, IntArray

_RANGE = Struct("=8qq4i")  # the fields of `records.StateRange`
_SAVE = Struct("=2q")
_LOAD, _UPDATE, _ROW, _SLOT, _FIRST_SAVE, _NUM_SAVES = range(6)  # of `records.Step`
NONE = -1


class PassStates:
    """The `records.StateRange` of every range of a pass, and the arrays they name.

    Attributes:
        num_slots: copies of a block that some steps make for others.
    """

    def __init__(self) -> None:
        self.num_slots = 0
        self._kept: list[object] = []

    def describe(self, memory: RecurrentStates, batch: ForwardBatch) -> int:
        """The address of the records; they hold until the next call."""
        ranges = np.empty(len(batch.ranges) * _RANGE.size, np.uint8)
        kept: list[object] = [ranges]
        num_slots = 0
        for index, item in enumerate(batch.ranges):
            work = memory.work(item.sequence_id)
            if len(work.rows) != item.num_rows:  # the kernels would read what is not there
                raise RuntimeError(f"{item.num_rows} rows run of a plan of {len(work.rows)}: reserve what runs")
            counts = tuple(count for count, _ in work.saves)
            schedule = chain_schedule(len(work.pending), item.num_rows, counts)
            if item.mask is not None:
                schedule = tree_schedule(len(work.pending), parents_of(item.mask), counts)
            num_slots = max(num_slots, schedule.num_slots)
            records, saves = np.array([*work.pending, *work.rows], np.int32), _saves(work)
            kept += [work, schedule, records, saves]
            _RANGE.pack_into(
                ranges.data, index * _RANGE.size,
                0 if work.state is None else work.state.ctypes.data, 0 if work.records is None else work.records.ctypes.data,
                records.ctypes.data, records.ctypes.data + 4 * len(work.pending), schedule.parents.ctypes.data,
                schedule.steps.ctypes.data, saves.ctypes.data, work.has_run.ctypes.data, memory.record_size,
                len(work.pending), work.num_folded, len(schedule.steps), len(work.saves),
            )  # fmt: skip
        self._kept, self.num_slots = kept, num_slots
        return int(ranges.ctypes.data)


@dataclass(frozen=True, slots=True)
class Schedule:
    """In which order a range's rows run through a state.

    Attributes:
        parents: [num_rows] of each row; -1 = the last pending row.
        steps: [num_steps, 6] `records.Step`.
        num_slots: copies that are alive at a time.
    """

    parents: IntArray
    steps: IntArray
    num_slots: int = 0


def parents_of(mask: BoolArray) -> tuple[int, ...]:
    """Of each row the last one before it that it sees; -1 = none."""
    before = np.tril(mask, -1)
    last = before.shape[1] - 1 - before[:, ::-1].argmax(axis=1)
    return tuple(np.where(before.any(axis=1), last, NONE).tolist())


@lru_cache(maxsize=256)
def chain_schedule(num_pending: int, num_rows: int, counts: tuple[int, ...]) -> Schedule:
    """Rows that follow one another: each update is taken in on the way to the row behind it.

    Args:
        counts: of updates, behind which the state is saved.
    """
    updates = [*range(-2, -2 - num_pending, -1), *range(num_rows)]
    num_updates = max(num_pending + num_rows - 1, *counts) if counts else num_pending + num_rows - 1
    steps = np.zeros((num_updates + (num_pending == 0), 6), np.int32)
    steps[:, :_FIRST_SAVE] = NONE
    first = int(num_pending == 0)  # a step without an update
    steps[first:, _UPDATE] = updates[:num_updates]
    rows = np.arange(len(steps)) + (1 - first - num_pending)
    steps[:, _ROW] = np.where((rows >= 0) & (rows < num_rows), rows, NONE)
    for number, count in enumerate(counts):
        _add_save(steps[count - 1 + first], number)
    return Schedule(np.arange(-1, num_rows - 1, dtype=np.int32), steps)


@lru_cache(maxsize=256)
def tree_schedule(num_pending: int, parents: tuple[int, ...], counts: tuple[int, ...]) -> Schedule:
    """Rows of a tree, its deepest first; a state from which several paths go on is copied.

    Args:
        counts: as in `chain_schedule`; rows behind the pending ones up to the last of them are a chain.
    """
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]  # those of the pending rows are the last
    for row, parent in enumerate(parents):
        children[parent].append(row)
    saved = {count - num_pending - 1 for count in counts}
    steps = [[NONE, -2 - number, NONE, NONE, 0, 0] for number in range(num_pending)] or [[NONE, NONE, NONE, NONE, 0, 0]]
    num_slots = 0
    todo: list[tuple[int, int, int]] = [(NONE, NONE, 0)]  # a row, the slot with the state behind its parent, the first free slot
    while todo:
        row, slot, free = todo.pop()
        if row != NONE:
            steps.append([slot, row, NONE, NONE, 0, 0])
        first, *others = children[row] or [NONE]
        steps[-1][_ROW] = first
        steps += [[NONE, NONE, other, NONE, 0, 0] for other in others]
        inner = [child for child in children[row] if children[child] or child in saved]
        if len(inner) > 1:
            steps[-1][_SLOT] = free
            num_slots = max(num_slots, free + 1)
        for place, child in reversed(list(enumerate(inner))):
            is_last = place == len(inner) - 1
            todo.append((child, free if place else NONE, free if is_last else free + 1))
    array = np.array(steps, np.int32)
    for number, count in enumerate(counts):
        update = -1 - count if count <= num_pending else count - num_pending - 1
        _add_save(array[int(np.flatnonzero(array[:, _UPDATE] == update)[0])], number)
    return Schedule(np.array(parents, np.int32), array, num_slots)


def _add_save(step: IntArray, number: int) -> None:
    if not step[_NUM_SAVES]:
        step[_FIRST_SAVE] = number
    step[_NUM_SAVES] += 1


def _saves(work: StateWork) -> NDArray[np.uint8]:
    packed = np.empty(len(work.saves) * _SAVE.size, np.uint8)
    for index, (count, state) in enumerate(work.saves):
        _SAVE.pack_into(packed.data, index * _SAVE.size, state.ctypes.data, count)
    return packed
