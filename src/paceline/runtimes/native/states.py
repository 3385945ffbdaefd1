"""Plan how a pass updates recurrent states: from which state each row continues, and in which order (kernels/state_blocks.c)."""

from dataclasses import dataclass, field
from functools import lru_cache
from struct import Struct

import numpy as np

from paceline.kv_cache.recurrent_state import RecurrentStateCache
from paceline.runtimes.base import ForwardBatch, IntArray
from paceline.runtimes.native.aligned import address_of
from paceline.runtimes.native.records import CHECKPOINT_INTERVAL

_RANGE_FORMAT = Struct("=11qq4i")  # struct format of `records.StateRange`
_FIRST_SAVE = 5  # index of `first_save` among the fields of `records.StateStep`; `num_saves` follows
NO_NODE, NO_PATH = -1, -1
IN_PLACE, NOT_STORED = -1, -2


class PassStateRecords:
    """The `StateRange` records of a pass, and the arrays to which they point.

    Attributes:
        num_temporary_states: maximum number of temporary states that are needed at the same time.
    """

    def __init__(self) -> None:
        self.num_temporary_states = 0
        self._arrays: list[object] = []

    def make_records(self, recurrent: RecurrentStateCache, batch: ForwardBatch) -> int:
        """Write the C structs that tell the kernels where the states of a pass's sequences are; return the address of the first."""
        ranges = np.empty(len(batch.ranges) * _RANGE_FORMAT.size, np.uint8)
        arrays: list[object] = [ranges]
        num_temporary_states = 0
        for index, item in enumerate(batch.ranges):
            update = recurrent.plan_update(item.sequence_id)
            if len(update.row_records) != item.num_rows:  # the kernels would read beyond the arrays
                raise RuntimeError(f"a range has {item.num_rows} rows, its plan {len(update.row_records)}: reserve the rows that run")
            save_counts = tuple(end for end, _ in update.saved_states)
            schedule = plan_state_schedule(len(update.pending_records), update.num_applied_rows, item.parents(), save_counts)
            num_temporary_states = max(num_temporary_states, schedule.num_temporary_states)
            records = np.array([*update.pending_records, *update.row_records], np.int32)
            saves = np.array([(state.ctypes.data, count) for count, state in update.saved_states], np.int64)  # `records.StateSave` each
            arrays += [update, schedule, records, saves]
            numbers_at = address_of(records)
            _RANGE_FORMAT.pack_into(
                ranges.data, index * _RANGE_FORMAT.size,
                0 if update.state is None else address_of(update.state), 0 if update.records is None else address_of(update.records),
                numbers_at, numbers_at + 4 * len(update.pending_records), *schedule.addresses, address_of(saves),
                address_of(update.has_run),
                recurrent.record_size, len(update.pending_records), update.num_applied_rows, len(schedule.steps), len(update.saved_states),
            )  # fmt: skip
        self._arrays, self.num_temporary_states = arrays, num_temporary_states
        return address_of(ranges)


@dataclass(frozen=True, slots=True)
class StateSchedule:
    """The steps in which the rows of a range run, and from which states.

    Pending rows are committed rows that the stored state does not include yet. A node is a row of the range, or -2 - i for pending row i.

    Attributes:
        parents: [num_rows] the node before each row; -1 = the last pending row.
        order: [num_rows] the rows, those of a step next to one another.
        ancestors: [num_rows, CHECKPOINT_INTERVAL] the earlier nodes on a row's path that the state of its step does not include, oldest
            first, padded with -1.
        paths: [num_paths, CHECKPOINT_INTERVAL] the nodes that a step adds to a state.
        steps: [num_steps, 7] the fields of each `records.StateStep`.
        num_temporary_states: maximum number of temporary states that are needed at the same time.
        addresses: addresses of the arrays, in this order.
    """

    parents: IntArray
    order: IntArray
    ancestors: IntArray
    paths: IntArray
    steps: IntArray
    num_temporary_states: int
    addresses: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        arrays = self.parents, self.order, self.ancestors, self.paths, self.steps
        object.__setattr__(self, "addresses", tuple(map(address_of, arrays)))


@lru_cache(maxsize=512)
def plan_state_schedule(num_pending: int, num_applied: int, parents: tuple[int, ...], save_counts: tuple[int, ...]) -> StateSchedule:
    """Return the schedule of a range. The stored state must include a multiple of CHECKPOINT_INTERVAL rows of the sequence.

    Args:
        num_pending: number of pending rows.
        num_applied: the first pending rows, which are added to the stored state; a multiple of CHECKPOINT_INTERVAL.
        parents: the row before each row; -1 = the last pending row.
        save_counts: after how many pending and new rows the state is copied; multiples of CHECKPOINT_INTERVAL.
    """
    return _Planner(num_pending, num_applied, parents, save_counts).schedule()


class _Planner:
    """Computes a schedule. In this class node 0 is the first pending row, the rows of the range follow, and -1 is the stored state.

    After every CHECKPOINT_INTERVAL nodes of a path, the state is computed. All rows that continue from the same state run together. The
    `base` of a row is the last node that its state includes.
    """

    def __init__(self, num_pending: int, num_applied: int, parents: tuple[int, ...], save_counts: tuple[int, ...]) -> None:
        self._num_pending, self._num_applied, self._save_counts = num_pending, num_applied, save_counts
        self._parents = [*range(-1, num_pending - 1), *(num_pending + parent for parent in parents)]
        self._bases: list[int] = []
        self._earlier_nodes: list[list[int]] = []  # by node: the nodes on the path from its base to itself
        for parent in self._parents:
            is_first = parent < 0 or len(self._earlier_nodes[parent]) == CHECKPOINT_INTERVAL - 1
            self._bases.append(parent if is_first else self._bases[parent])
            self._earlier_nodes.append([] if is_first else [*self._earlier_nodes[parent], parent])
        self._rows: dict[int, list[int]] = {}
        for node in range(num_pending, len(self._parents)):
            self._rows.setdefault(self._bases[node], []).append(node)
        self._children: dict[int, list[int]] = {}
        seen = {-1}
        for base in [*(count - 1 for count in save_counts), *self._rows]:
            while base not in seen:
                seen.add(base)
                self._children.setdefault(self._bases[base], []).append(base)
                base = self._bases[base]
        self._steps: list[list[int]] = []
        self._order: list[int] = []
        self._paths: list[list[int]] = []
        self._num_temporary_states = 0

    def schedule(self) -> StateSchedule:
        num_rows, base, source = len(self._parents) - self._num_pending, -1, IN_PLACE
        self._add_row_steps(base, source)
        pending_bases = self._next_bases(base, source, 0)
        while pending_bases:  # depth-first
            base, source, free = pending_bases.pop()
            pending_bases += self._next_bases(base, *self._add_base_steps(base, source, free))
        ancestors = np.full((num_rows, CHECKPOINT_INTERVAL), NO_NODE, np.int32)
        for row in range(num_rows):
            earlier = self._earlier_nodes[self._num_pending + row]
            ancestors[row, : len(earlier)] = self._kernel_nodes(earlier)
        return StateSchedule(
            np.array(self._kernel_nodes(self._parents[self._num_pending :], is_parent=True), np.int32), np.array(self._order, np.int32),
            ancestors, np.array(self._paths, np.int32).reshape(-1, CHECKPOINT_INTERVAL), np.array(self._steps, np.int32),
            self._num_temporary_states,
        )  # fmt: skip

    def _next_bases(self, base: int, source: int, free: int) -> list[tuple[int, int, int]]:
        """Return (base, location of its start state, next free number) of the bases that continue from `base`, in reverse order.

        The last one that is computed may overwrite the temporary state of `base`.
        """
        children = self._children.get(base, [])
        return [(child, source, free - (not number and source >= 0)) for number, child in enumerate(reversed(children))]

    def _add_base_steps(self, base: int, source: int, free: int) -> tuple[int, int]:
        """Append the steps that compute the state of `base` from that in `source`, and run the rows that continue from it.

        Returns:
            Where the state is (number of a temporary state, IN_PLACE or NOT_STORED), and the next free number.
        """
        rows = self._rows.get(base, [])
        saves = [number for number, count in enumerate(self._save_counts) if count - 1 == base]
        to = NOT_STORED
        if base < self._num_applied:
            to = IN_PLACE
        elif saves or len(rows) > CHECKPOINT_INTERVAL or self._children.get(base):
            to = free
            self._num_temporary_states = max(self._num_temporary_states, free + 1)
        self._paths.append(self._kernel_nodes([*self._earlier_nodes[base], base]))
        self._add_row_steps(base, source, to, len(self._paths) - 1)
        if saves:
            index = len(self._steps) - max(1, -(-len(rows) // CHECKPOINT_INTERVAL))
            self._steps[index][_FIRST_SAVE:] = [saves[0], len(saves)]
        return to, free + (to >= 0)

    def _add_row_steps(self, base: int, source: int, to: int = NOT_STORED, path: int = NO_PATH) -> None:
        """Append the steps of the rows that continue from the state of `base`. The first step computes that state with `path`."""
        rows = self._rows.get(base, [])
        for first in range(0, max(len(rows), path != NO_PATH), CHECKPOINT_INTERVAL):
            part = rows[first : first + CHECKPOINT_INTERVAL]
            self._steps.append([source, to, path, len(self._order), len(part), 0, 0])
            self._order += [node - self._num_pending for node in part]
            if path != NO_PATH:
                source, to, path = to, NOT_STORED, NO_PATH

    def _kernel_nodes(self, nodes: list[int], *, is_parent: bool = False) -> list[int]:
        """Return nodes as the kernels number them (`StateSchedule`). is_parent: a pending row is -1."""
        first = self._num_pending
        return [node - first if node >= first else NO_NODE if is_parent else -2 - node for node in nodes]
