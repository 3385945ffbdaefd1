"""In which order rows run through a state: every row must start from the rows before it, whatever else is in the pass."""

import numpy as np
import pytest

from paceline.runtimes.native.records import CHECKPOINT_INTERVAL
from paceline.runtimes.native.states import IN_PLACE, NOT_STORED, StateSchedule, plan_state_schedule

Path = tuple[int, ...]


def paths_of(num_pending: int, parents: tuple[int, ...]) -> list[Path]:
    """Of each row the nodes before it, pending ones as -2 - i."""
    pending = tuple(-2 - number for number in range(num_pending))
    paths: list[Path] = []
    for parent in parents:
        paths.append(pending if parent < 0 else (*paths[parent], parent))
    return paths


def run(schedule: StateSchedule, num_applied: int, parents: tuple[int, ...]) -> tuple[dict[int, Path], dict[int, Path]]:
    """What the kernels would do: of each row the nodes it starts from, and of each save the nodes it has taken in."""
    places: dict[int, Path] = {IN_PLACE: ()}
    rows, saves = dict[int, Path](), dict[int, Path]()
    for origin, to, path, first_row, num_rows, first_save, num_saves in schedule.steps.tolist():
        state = places[origin]
        if path >= 0:
            state = (*state, *schedule.paths[path].tolist())
            if to != NOT_STORED:
                places[to] = state
        else:
            assert to == NOT_STORED
        assert to < schedule.num_temporary_states
        assert num_rows <= CHECKPOINT_INTERVAL
        assert to != NOT_STORED or not num_saves
        saves |= dict.fromkeys(range(first_save, first_save + num_saves), state)
        for row in schedule.order[first_row : first_row + num_rows].tolist():
            own = schedule.ancestors[row]
            assert own[-1] == -1
            known = own[own != -1].tolist()
            assert own[: len(known)].tolist() == known
            assert parents[row] == -1 or parents[row] in rows
            rows[row] = (*state, *known)
    assert len(places[IN_PLACE]) == num_applied
    return rows, saves


def trees(random: np.random.Generator, num_rows: int) -> tuple[int, ...]:
    """Parents of rows: a chain, or each after any of the last ones."""
    if random.random() < 0.3:
        return tuple(range(-1, num_rows - 1))
    return tuple(int(random.integers(max(-1, row - 6), row)) for row in range(num_rows))


def test_state_schedule_starts_each_row_from_its_parent_rows(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(400):
        num_pending, num_rows = int(random.integers(0, 40)), int(random.integers(1, 40))
        num_applied = int(random.integers(0, num_pending // CHECKPOINT_INTERVAL + 1)) * CHECKPOINT_INTERVAL
        known = int(random.integers(0, num_rows))  # a chain in front of the tree
        parents = (*range(-1, known - 1), *(known + parent for parent in trees(random, num_rows - known)))
        borders = range(CHECKPOINT_INTERVAL, num_pending + known + 1, CHECKPOINT_INTERVAL)
        counts = tuple(sorted(random.choice(borders, random.integers(0, len(borders) + 1), replace=False).tolist())) if borders else ()
        found, saves = run(plan_state_schedule(num_pending, num_applied, parents, counts), num_applied, parents)
        wanted = paths_of(num_pending, parents)
        assert [found[row] for row in range(num_rows)] == wanted
        whole = [*(-2 - number for number in range(num_pending)), *range(known)]
        assert [saves[number] for number in range(len(counts))] == [tuple(whole[:count]) for count in counts]


@pytest.mark.parametrize("num_pending", [0, 3, 7, 8, 12])
@pytest.mark.parametrize("num_rows", [1, 8, 9, 512])
def test_number_of_unsaved_state_rows_depends_on_position_only(num_pending: int, num_rows: int) -> None:
    schedule = plan_state_schedule(num_pending, 0, tuple(range(-1, num_rows - 1)), ())
    counts = (schedule.ancestors != -1).sum(axis=1)
    assert counts.tolist() == [(num_pending + row) % CHECKPOINT_INTERVAL for row in range(num_rows)]


def test_state_schedule_of_a_chain_keeps_one_extra_state() -> None:
    assert plan_state_schedule(5, 0, tuple(range(-1, 511)), (512,)).num_temporary_states == 1
    assert plan_state_schedule(5, 0, tuple(range(-1, 7)), ()).num_temporary_states == 0
