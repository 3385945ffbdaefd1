"""A tree laid out in a cache of labels: every row sees the prompt and its own ancestors, whatever the block borders."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from paceline.kv_cache.row_plan import (
    RowPlan,
    is_chain,
    num_blocks_for,
    path_to,
    plan_rows,
    tree_mask,
)

Label = tuple[str, int]  # ("prompt", position) or ("node", node)
Cells = dict[tuple[int, int], Label]  # (block, slot in it) -> the row cached there
COMMITTED_LENGTHS = (0, 1, 30, 31, 32, 33, 63, 64, 65)
TREES = {
    "root": [-1],
    "chain": [-1, 0, 1, 2, 3],
    "long chain": list(range(-1, 39)),
    "fork": [-1, 0, 0],
    "star": [-1, *[0] * 11],
    "binary": [-1, *[node // 2 for node in range(11)]],
    "comb": [-1, 0, 0, 1, 1, 3, 3, 5, 5],
    "trunk then fork": [-1, 0, 1, 2, 3, 4, 4, 5, 6],
    "big star": [-1, *[0] * 39],
    "forty": [-1, *[node // 3 for node in range(39)]],
}


def _random_parents(generator: np.random.Generator, num_nodes: int) -> list[int]:
    """A random tree whose nodes are in breadth-first order."""
    parents = [-1]
    for node in range(1, num_nodes):
        reach = int(generator.integers(1, 5))
        parents.append(int(generator.integers(max(parents[-1], 0), min(node, max(parents[-1], 0) + reach))))
    return parents


def _plan(parents: Sequence[int], committed_len: int, block_size: int = 32) -> tuple[RowPlan, list[int]]:
    """The plan and the sequence's own block table before it."""
    num_own = num_blocks_for(committed_len, block_size)
    num_fresh = num_blocks_for(committed_len + len(parents), block_size) - num_own
    blocks = (1 + np.random.default_rng([committed_len, len(parents)]).permutation(num_own + num_fresh)).tolist()
    return plan_rows(parents, committed_len, blocks[:num_own], blocks[num_own:], block_size), blocks[:num_own]


def _cell(table: Sequence[int], slot: int, block_size: int) -> tuple[int, int]:
    return table[slot // block_size], slot % block_size


def _run_pass(plan: RowPlan, own_table: Sequence[int]) -> Cells:
    """Write every row through the table; a row may only write where nobody else's row is."""
    size = plan.block_size
    cells: Cells = {_cell(own_table, slot, size): ("prompt", slot) for slot in range(plan.committed_len)}
    for node in range(plan.num_rows):
        cell = _cell(plan.block_table, plan.committed_len + node, size)
        assert cell not in cells, f"node {node} overwrites a row"
        cells[cell] = ("node", node)
    return cells


def _attended(plan: RowPlan, cells: Cells, row: int) -> list[Label | None]:
    """What a row attends to, in the order of the slots."""
    seen = range(row + 1) if plan.mask is None else np.flatnonzero(plan.mask[row]).tolist()
    slots = [*range(plan.committed_len), *(plan.committed_len + other for other in seen)]
    return [cells.get(_cell(plan.block_table, slot, plan.block_size)) for slot in slots]


def _expected(plan: RowPlan, node: int) -> list[Label]:
    return [*(("prompt", slot) for slot in range(plan.committed_len)), *(("node", one) for one in path_to(plan.parents, node))]


def _check_rows(plan: RowPlan, own_table: Sequence[int]) -> None:
    cells = _run_pass(plan, own_table)
    for node in range(len(plan.parents)):
        assert _attended(plan, cells, node) == _expected(plan, node)
        assert plan.positions[node] == plan.committed_len + len(path_to(plan.parents, node)) - 1
    assert plan.num_rows == len(plan.positions) == len(plan.parents)
    assert list(plan.block_table) == [*own_table, *plan.fresh_blocks]


def _check_commit(plan: RowPlan, own_table: Sequence[int], node: int) -> None:
    cells = _run_pass(plan, own_table)
    commit = plan.committed_path(node)
    for source, target in commit.moves:
        assert plan.committed_len <= target < commit.committed_len
        moved = cells[_cell(plan.block_table, source, plan.block_size)]
        cells[_cell(commit.block_table, target, plan.block_size)] = moved
    slots = range(commit.committed_len)
    assert [cells.get(_cell(commit.block_table, slot, plan.block_size)) for slot in slots] == _expected(plan, node)
    assert len(commit.block_table) == num_blocks_for(commit.committed_len, plan.block_size)
    assert set(commit.block_table) <= {*own_table, *plan.fresh_blocks}


def _check(plan: RowPlan, own_table: Sequence[int]) -> None:
    _check_rows(plan, own_table)
    for node in range(len(plan.parents)):
        _check_commit(plan, own_table, node)


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_row_plan_shows_prompt_and_ancestors_to_every_node(parents):
    for committed_len in COMMITTED_LENGTHS:
        plan, own_table = _plan(parents, committed_len)
        _check(plan, own_table)


@pytest.mark.parametrize("block_size", [4, 32])
def test_row_plan_of_random_trees_shows_ancestors_and_can_be_kept(block_size, seed, large_counts):
    generator = np.random.default_rng([seed, block_size])
    for case in range(2_000 if large_counts else 100):
        num_nodes = 40 if case % 25 == 0 else int(generator.integers(1, 13))
        parents = _random_parents(generator, num_nodes)
        committed_len = int(generator.integers(0, 3 * block_size + 2))
        plan, own_table = _plan(parents, committed_len, block_size)
        _check(plan, own_table)


@pytest.mark.parametrize("parents", [[-1], range(-1, 7), [-1, 0, 1, 2]], ids=["root", "range", "list"])
def test_chain_has_no_mask(parents):
    for committed_len in COMMITTED_LENGTHS:
        plan, own_table = _plan(parents, committed_len)
        assert plan.mask is None
        _check(plan, own_table)


def test_tree_mask_shows_ancestors_and_self_only(seed):
    generator = np.random.default_rng(seed)
    for num_nodes in (1, 2, 7, 12, 40):
        parents = _random_parents(generator, num_nodes)
        mask = tree_mask(parents)
        assert [np.flatnonzero(row).tolist() for row in mask] == [path_to(parents, node) for node in range(num_nodes)]


def test_is_chain_is_false_with_a_branch():
    assert is_chain([-1])
    assert is_chain([-1, 0, 1])
    assert not is_chain([-1, 0, 0])


@pytest.mark.parametrize("node", [-1, 3, 40])
@pytest.mark.parametrize("parents", [[-1, 0, 1], [-1, 0, 0]], ids=["chain", "fork"])
def test_row_plan_commit_of_a_node_outside_the_tree_raises(parents, node):
    plan, _ = _plan(parents, 5)
    with pytest.raises(ValueError, match="not in the tree"):
        plan.committed_path(node)


def test_fault_of_a_tree_mask_that_shows_a_sibling_is_found():
    plan, own_table = _plan([-1, 0, 0], 33)
    with pytest.raises(AssertionError):
        _check_rows(replace(plan, mask=np.tri(3, dtype=np.bool_)), own_table)
