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
        num_temporary_states: most temporary states that exist at the same time.
    """

    def __init__(self) -> None:
        self.num_temporary_states = 0
        self._arrays: list[object] = []

    def make_records(self, recurrent: RecurrentStateCache, batch: ForwardBatch) -> int:
        """Write a `StateRange` record for each range of the batch and return the address of the first."""
        ranges = np.empty(len(batch.ranges) * _RANGE_FORMAT.size, np.uint8)
        arrays: list[object] = [ranges]
        num_temporary_states = 0
        for index, item in enumerate(batch.ranges):
            update = recurrent.plan_update(item.sequence_id)
            if len(update.row_records) != item.num_rows:  # else the kernels would read beyond the array
                raise RuntimeError(f"a range has {item.num_rows} rows, {len(update.row_records)} are reserved: reserve all rows")
            save_counts = tuple(end for end, _ in update.states_to_save)
            schedule = plan_state_schedule(len(update.pending_records), update.num_applied_rows, item.parents(), save_counts)
            num_temporary_states = max(num_temporary_states, schedule.num_temporary_states)
            records = np.array([*update.pending_records, *update.row_records], np.int32)
            saves = np.array([(state.ctypes.data, count) for count, state in update.states_to_save], np.int64)  # `records.StateSave`
            arrays += [update, schedule, records, saves]
            numbers_at = address_of(records)
            _RANGE_FORMAT.pack_into(
                ranges.data, index * _RANGE_FORMAT.size,
                0 if update.state is None else address_of(update.state), 0 if update.records is None else address_of(update.records),
                numbers_at, numbers_at + 4 * len(update.pending_records), *schedule.addresses, address_of(saves),
                address_of(update.has_run), recurrent.record_size,
                len(update.pending_records), update.num_applied_rows, len(schedule.steps), len(update.states_to_save),
            )  # fmt: skip
        self._arrays, self.num_temporary_states = arrays, num_temporary_states
        return address_of(ranges)


@dataclass(frozen=True, slots=True)
class StateSchedule:
    """The steps in which the kernels compute the rows of a range, and the states from which the steps start.

    Pending rows are committed rows that the stored state does not include yet. A node is a row of the range, or -2 - i for pending row i.

    Attributes:
        parents: [num_rows] the parent of each row; -1 = the last pending row.
        order: [num_rows] the rows, grouped by step.
        ancestors: [num_rows, CHECKPOINT_INTERVAL] the earlier nodes on a row's path that the state of its step does not include, oldest
            first, padded with -1.
        paths: [num_paths, CHECKPOINT_INTERVAL] the nodes whose updates a step applies to a state.
        steps: [num_steps, 7] the fields of each `records.StateStep`.
        num_temporary_states: most temporary states that exist at the same time.
        addresses: addresses of the five arrays, in the order above.
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
    """Return the schedule of a range whose stored state includes a multiple of CHECKPOINT_INTERVAL rows of the sequence.

    Args:
        num_pending: number of pending rows.
        num_applied: how many of the first pending rows are added to the stored state; a multiple of CHECKPOINT_INTERVAL.
        parents: the parent of each row; -1 = the last pending row.
        save_counts: the state is copied after each of these numbers of pending and new rows; multiples of CHECKPOINT_INTERVAL.
    """
    return _SchedulePlanner(num_pending, num_applied, parents, save_counts).schedule()


class _SchedulePlanner:
    """Computes a schedule. In this class node 0 is the first pending row, the rows of the range follow, and -1 is the stored state.

    A state is computed after every CHECKPOINT_INTERVAL nodes of a path. Each row starts from such a state; its `base` is the last node that
    this state includes. Rows with the same base run in the same steps.
    """

    def __init__(self, num_pending: int, num_applied: int, parents: tuple[int, ...], save_counts: tuple[int, ...]) -> None:
        self._num_pending, self._num_applied, self._save_counts = num_pending, num_applied, save_counts
        self._parents = [*range(-1, num_pending - 1), *(num_pending + parent for parent in parents)]
        self._bases: list[int] = []
        self._earlier_nodes: list[list[int]] = []  # by node: the nodes between its base and itself
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
            base, source, next_free = pending_bases.pop()
            pending_bases += self._next_bases(base, *self._add_base_steps(base, source, next_free))
        ancestors = np.full((num_rows, CHECKPOINT_INTERVAL), NO_NODE, np.int32)
        for row in range(num_rows):
            earlier = self._earlier_nodes[self._num_pending + row]
            ancestors[row, : len(earlier)] = self._kernel_nodes(earlier)
        return StateSchedule(
            np.array(self._kernel_nodes(self._parents[self._num_pending :], is_parent=True), np.int32), np.array(self._order, np.int32),
            ancestors, np.array(self._paths, np.int32).reshape(-1, CHECKPOINT_INTERVAL), np.array(self._steps, np.int32),
            self._num_temporary_states,
        )  # fmt: skip

    def _next_bases(self, base: int, source: int, next_free: int) -> list[tuple[int, int, int]]:
        """Return the bases whose states are computed from that of `base`, which is in `source`, last one first.

        Each is a tuple (base, location of its start state, next free temporary state). The base computed last may overwrite `source`.
        """
        children = self._children.get(base, [])
        return [(child, source, next_free - (not number and source >= 0)) for number, child in enumerate(reversed(children))]

    def _add_base_steps(self, base: int, source: int, next_free: int) -> tuple[int, int]:
        """Append the steps that compute the state of `base` from the state in `source`, and those of the rows that start from the result.

        Returns:
            Where the state is (number of a temporary state, IN_PLACE or NOT_STORED), and the next free temporary state.
        """
        rows = self._rows.get(base, [])
        saves = [number for number, count in enumerate(self._save_counts) if count - 1 == base]
        to = NOT_STORED
        if base < self._num_applied:
            to = IN_PLACE
        elif saves or len(rows) > CHECKPOINT_INTERVAL or self._children.get(base):
            to = next_free
            self._num_temporary_states = max(self._num_temporary_states, next_free + 1)
        self._paths.append(self._kernel_nodes([*self._earlier_nodes[base], base]))
        self._add_row_steps(base, source, to, len(self._paths) - 1)
        if saves:
            index = len(self._steps) - max(1, -(-len(rows) // CHECKPOINT_INTERVAL))
            self._steps[index][_FIRST_SAVE:] = [saves[0], len(saves)]
        return to, next_free + (to >= 0)

    def _add_row_steps(self, base: int, source: int, to: int = NOT_STORED, path: int = NO_PATH) -> None:
        """Append the steps of the rows with this base. The first applies `path` to the state in `source` and writes to `to`."""
        rows = self._rows.get(base, [])
        for first in range(0, max(len(rows), path != NO_PATH), CHECKPOINT_INTERVAL):
            nodes = rows[first : first + CHECKPOINT_INTERVAL]
            self._steps.append([source, to, path, len(self._order), len(nodes), 0, 0])
            self._order += [node - self._num_pending for node in nodes]
            if path != NO_PATH:
                source, to, path = to, NOT_STORED, NO_PATH

    def _kernel_nodes(self, nodes: list[int], *, is_parent: bool = False) -> list[int]:
        """Convert node numbers of this class to those of `StateSchedule`. is_parent: they are parents, where a pending row is -1."""
        first = self._num_pending
        return [node - first if node >= first else NO_NODE if is_parent else -2 - node for node in nodes]
