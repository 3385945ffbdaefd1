"""Plan what a pass does to recurrent states: which rows extend which stored state, in which order (kernels/state_blocks.c)."""

from dataclasses import dataclass, field
from functools import lru_cache
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache.recurrent_state import RecurrentStateCache, StateUpdate
from paceline.runtimes.base import BoolArray, ForwardBatch, IntArray
from paceline.runtimes.native.aligned import address_of
from paceline.runtimes.native.records import CHECKPOINT_INTERVAL

_RANGE = Struct("=11qq4i")  # struct format of `records.StateRange`
_SAVE = Struct("=2q")
_FROM, _TO, _PATH, _FIRST_ROW, _NUM_ROWS, _FIRST_SAVE, _NUM_SAVES = range(7)  # of `records.StateStep`
NONE = -1
IN_PLACE, NOWHERE = -1, -2


class PassStates:
    """The `StateRange` records of a pass and the arrays they point to.

    Attributes:
        num_slots: temporary states of a block that must be held at a time.
    """

    def __init__(self) -> None:
        self.num_slots = 0
        self._kept: list[object] = []

    def fill(self, recurrent: RecurrentStateCache, batch: ForwardBatch) -> int:
        """Fill the state records of one pass and return their address."""
        ranges = np.empty(len(batch.ranges) * _RANGE.size, np.uint8)
        kept: list[object] = [ranges]
        num_slots = 0
        for index, item in enumerate(batch.ranges):
            update = recurrent.plan_update(item.sequence_id)
            if len(update.row_records) != item.num_rows:  # otherwise the kernels would read out of bounds
                raise RuntimeError(f"a range has {item.num_rows} rows, its plan {len(update.row_records)}: reserve the rows that run")
            parents = tuple(range(-1, item.num_rows - 1)) if item.mask is None else tree_parents(item.mask)
            schedule = plan_state_schedule(len(update.pending), update.num_applied, parents, tuple(end for end, _ in update.saved_states))
            num_slots = max(num_slots, schedule.num_slots)
            records, saves = np.array([*update.pending, *update.row_records], np.int32), _save_records(update)
            kept += [update, schedule, records, saves]
            numbers_at = address_of(records)
            _RANGE.pack_into(
                ranges.data, index * _RANGE.size,
                0 if update.state is None else address_of(update.state), 0 if update.records is None else address_of(update.records),
                numbers_at, numbers_at + 4 * len(update.pending), *schedule.addresses, address_of(saves), address_of(update.has_run),
                recurrent.record_size, len(update.pending), update.num_applied, len(schedule.steps), len(update.saved_states),
            )  # fmt: skip
        self._kept, self.num_slots = kept, num_slots
        return address_of(ranges)


@dataclass(frozen=True, slots=True)
class StateSchedule:
    """The order in which a range's rows run. A node is a row of the range, or -2 - i for the pending row i.

    Attributes:
        parents: [num_rows] parent of each row; -1 = the last pending row.
        order: [num_rows] rows, those of a step next to one another.
        ancestors: [num_rows, CHECKPOINT_INTERVAL] earlier nodes on a row's path that its step's state does not include, oldest first,
            padded with -1.
        paths: [num_paths, CHECKPOINT_INTERVAL] nodes that steps add to a state.
        steps: [num_steps, 7] `records.StateStep`.
        num_slots: temporary states of a block that must be held at a time.
        addresses: addresses of these arrays, in this order.
    """

    parents: IntArray
    order: IntArray
    ancestors: IntArray
    paths: IntArray
    steps: IntArray
    num_slots: int
    addresses: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        arrays = self.parents, self.order, self.ancestors, self.paths, self.steps
        object.__setattr__(self, "addresses", tuple(map(address_of, arrays)))


def tree_parents(mask: BoolArray) -> tuple[int, ...]:
    """Return the parent of each row of a tree mask: the last earlier row it attends to; -1 = none."""
    before = np.tril(mask, -1)
    last = before.shape[1] - 1 - before[:, ::-1].argmax(axis=1)
    return tuple(np.where(before.any(axis=1), last, NONE).tolist())


@lru_cache(maxsize=512)
def plan_state_schedule(num_pending: int, num_applied: int, parents: tuple[int, ...], counts: tuple[int, ...]) -> StateSchedule:
    """Return the schedule of a range. The stored state covers a multiple of CHECKPOINT_INTERVAL rows.

    Args:
        num_applied: pending rows to add to the stored state in place; a multiple of CHECKPOINT_INTERVAL.
        parents: parent of each row; -1 = the last pending row.
        counts: save the state after so many pending and new rows (a chain up to there); multiples of CHECKPOINT_INTERVAL.
    """
    return _Planner(num_pending, num_applied, parents, counts).schedule()


class _Planner:
    """Makes a schedule. Here nodes are numbered from the first pending row on; -1 is the stored state.

    Every CHECKPOINT_INTERVAL rows of a path a new state is computed. Rows that extend the same state run together; the last node that
    state includes is their `base`.
    """

    def __init__(self, num_pending: int, num_applied: int, parents: tuple[int, ...], counts: tuple[int, ...]) -> None:
        self._num_pending, self._num_folded, self._counts = num_pending, num_applied, counts
        self._parents = [*range(-1, num_pending - 1), *(num_pending + parent for parent in parents)]
        self._bases: list[int] = []
        self._before: list[list[int]] = []  # for each node, the earlier nodes after its base state
        for parent in self._parents:
            is_first = parent < 0 or len(self._before[parent]) == CHECKPOINT_INTERVAL - 1
            self._bases.append(parent if is_first else self._bases[parent])
            self._before.append([] if is_first else [*self._before[parent], parent])
        self._rows: dict[int, list[int]] = {}
        for node in range(num_pending, len(self._parents)):
            self._rows.setdefault(self._bases[node], []).append(node)
        self._children: dict[int, list[int]] = {}
        seen = {-1}
        for base in [*(count - 1 for count in counts), *self._rows]:
            while base not in seen:
                seen.add(base)
                self._children.setdefault(self._bases[base], []).append(base)
                base = self._bases[base]
        self._steps: list[list[int]] = []
        self._order: list[int] = []
        self._paths: list[list[int]] = []
        self._num_slots = 0

    def schedule(self) -> StateSchedule:
        num_rows, base, place = len(self._parents) - self._num_pending, -1, IN_PLACE
        self._run_rows(base, place)
        todo = self._extending_bases(base, place, 0)
        while todo:  # depth first
            base, place, free = todo.pop()
            todo += self._extending_bases(base, *self._compute_base_state(base, place, free))
        ancestors = np.full((num_rows, CHECKPOINT_INTERVAL), NONE, np.int32)
        for row in range(num_rows):
            before = self._before[self._num_pending + row]
            ancestors[row, : len(before)] = self._kernel_nodes(before)
        return StateSchedule(
            np.array(self._kernel_nodes(self._parents[self._num_pending :], is_parent=True), np.int32), np.array(self._order, np.int32),
            ancestors, np.array(self._paths, np.int32).reshape(-1, CHECKPOINT_INTERVAL), np.array(self._steps, np.int32), self._num_slots,
        )  # fmt: skip

    def _extending_bases(self, base: int, place: int, free: int) -> list[tuple[int, int, int]]:
        """Return the base states that extend `base`, in reverse order. The last one visited may reuse its slot."""
        children = self._children.get(base, [])
        return [(child, place, free - (not number and place >= 0)) for number, child in enumerate(reversed(children))]

    def _compute_base_state(self, base: int, place: int, free: int) -> tuple[int, int]:
        """Compute a base state and run the rows that extend it. Return where the state is kept and the next free slot."""
        rows = self._rows.get(base, [])
        saves = [number for number, count in enumerate(self._counts) if count - 1 == base]
        to = NOWHERE
        if base < self._num_folded:
            to = IN_PLACE
        elif saves or len(rows) > CHECKPOINT_INTERVAL or self._children.get(base):
            to = free
            self._num_slots = max(self._num_slots, free + 1)
        self._paths.append(self._kernel_nodes([*self._before[base], base]))
        self._run_rows(base, place, to, len(self._paths) - 1)
        if saves:
            index = len(self._steps) - max(1, -(-len(rows) // CHECKPOINT_INTERVAL))
            self._steps[index][_FIRST_SAVE:] = [saves[0], len(saves)]
        return to, free + (to >= 0)

    def _run_rows(self, base: int, place: int, to: int = NOWHERE, path: int = NONE) -> None:
        """Append the steps of the rows that extend a base. The first one also computes its state from `path`."""
        rows = self._rows.get(base, [])
        for first in range(0, max(len(rows), path != NONE), CHECKPOINT_INTERVAL):
            part = rows[first : first + CHECKPOINT_INTERVAL]
            self._steps.append([place, to, path, len(self._order), len(part), 0, 0])
            self._order += [node - self._num_pending for node in part]
            if path != NONE:
                place, to, path = to, NOWHERE, NONE

    def _kernel_nodes(self, nodes: list[int], *, is_parent: bool = False) -> list[int]:
        """Return nodes by the kernels' numbers; a pending parent is -1."""
        first = self._num_pending
        return [node - first if node >= first else NONE if is_parent else -2 - node for node in nodes]


def _save_records(update: StateUpdate) -> NDArray[np.uint8]:
    packed = np.empty(len(update.saved_states) * _SAVE.size, np.uint8)
    for index, (count, state) in enumerate(update.saved_states):
        _SAVE.pack_into(packed.data, index * _SAVE.size, state.ctypes.data, count)
    return packed
