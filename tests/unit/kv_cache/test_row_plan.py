"""A tree laid out in a cache of labels: every row sees the prompt and its own ancestors, whatever the layout and the block borders."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from paceline.kv_cache.row_plan import (
    RowPlan,
    TreeLayout,
    blocks_for,
    fresh_blocks_needed,
    is_chain,
    num_rows,
    path_to,
    plan_rows,
    root_to_leaf_paths,
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


def _plan(parents: Sequence[int], committed_len: int, layout: TreeLayout, block_size: int = 32) -> tuple[RowPlan, list[int]]:
    """The plan and the sequence's own block table before it."""
    num_own = blocks_for(committed_len, block_size)
    num_fresh = fresh_blocks_needed(parents, committed_len, num_own, layout, block_size)
    assert num_fresh >= 0
    blocks = (1 + np.random.default_rng([committed_len, len(parents)]).permutation(num_own + num_fresh)).tolist()
    return plan_rows(parents, committed_len, blocks[:num_own], blocks[num_own:], layout, block_size), blocks[:num_own]


def _cell(table: Sequence[int], slot: int, block_size: int) -> tuple[int, int]:
    return table[slot // block_size], slot % block_size


def _run_pass(plan: RowPlan, own_table: Sequence[int]) -> Cells:
    """Copy blocks, then write every row through its path's table; a row may only write where nobody else's row is."""
    size = plan.block_size
    prompt: Cells = {_cell(own_table, slot, size): ("prompt", slot) for slot in range(plan.committed_len)}
    cells = dict(prompt)
    for source, target in plan.copies:
        assert target in plan.fresh_blocks
        cells.update({(target, slot): cells[source, slot] for slot in range(size) if (source, slot) in cells})
    written: set[tuple[int, int]] = set()
    for path in plan.paths:
        for row, node in enumerate(path.nodes):
            cell = _cell(path.block_table, plan.committed_len + row, size)
            assert cell not in prompt, f"node {node} overwrites a committed row"
            assert cell not in written, f"node {node} overwrites another path's row"
            written.add(cell)
            cells[cell] = ("node", node)
    return cells


def _attended(plan: RowPlan, cells: Cells, path_index: int, row: int) -> list[Label | None]:
    """What a row of a path attends to, in the order of the slots."""
    path = plan.paths[path_index]
    seen = range(row + 1) if path.mask is None else np.flatnonzero(path.mask[row]).tolist()
    slots = [*range(plan.committed_len), *(plan.committed_len + other for other in seen)]
    return [cells.get(_cell(path.block_table, slot, plan.block_size)) for slot in slots]


def _expected(plan: RowPlan, node: int) -> list[Label]:
    return [*(("prompt", slot) for slot in range(plan.committed_len)), *(("node", one) for one in path_to(plan.parents, node))]


def _check_rows(plan: RowPlan, own_table: Sequence[int]) -> None:
    cells = _run_pass(plan, own_table)
    for index, path in enumerate(plan.paths):
        rows = range(path.first_row, path.first_row + path.num_rows)
        assert [plan.row_nodes[row] for row in rows] == list(path.nodes)
        for row, node in enumerate(path.nodes):
            assert _attended(plan, cells, index, row) == _expected(plan, node)
            assert plan.row_positions[path.first_row + row] == plan.committed_len + len(path_to(plan.parents, node)) - 1
    assert [plan.row_nodes[row] for row in plan.row_of_node] == list(range(len(plan.parents)))
    assert sum(path.num_rows for path in plan.paths) == plan.num_rows == len(plan.row_positions)


def _check_blocks(plan: RowPlan, own_table: Sequence[int]) -> None:
    """Every fresh block is used, by one path only; the first path goes on in the sequence's own blocks and copies nothing."""
    tables = [list(path.block_table) for path in plan.paths]
    assert sorted(block for table in tables for block in table if block in plan.fresh_blocks) == sorted(plan.fresh_blocks)
    assert len(set(plan.fresh_blocks)) == len(plan.fresh_blocks)
    assert tables[0][: len(own_table)] == list(own_table)
    assert not {target for _, target in plan.copies} & set(tables[0])
    assert [len(table) for table in tables] == [blocks_for(plan.committed_len + path.num_rows, plan.block_size) for path in plan.paths]
    num_shared = plan.committed_len // plan.block_size
    for table in tables[1:]:
        assert table[:num_shared] == list(own_table[:num_shared])
        assert set(table[num_shared:]) <= set(plan.fresh_blocks)


def _check_commit(plan: RowPlan, own_table: Sequence[int], node: int) -> None:
    cells = _run_pass(plan, own_table)
    commit = plan.commit(node)
    for source, target in commit.moves:
        assert plan.committed_len <= target < commit.committed_len
        moved = cells[_cell(plan.paths[0].block_table, source, plan.block_size)]
        cells[_cell(commit.block_table, target, plan.block_size)] = moved
    slots = range(commit.committed_len)
    assert [cells.get(_cell(commit.block_table, slot, plan.block_size)) for slot in slots] == _expected(plan, node)
    assert len(commit.block_table) == blocks_for(commit.committed_len, plan.block_size)
    assert set(commit.block_table) <= {*own_table, *plan.fresh_blocks}


def _check(plan: RowPlan, own_table: Sequence[int]) -> None:
    _check_rows(plan, own_table)
    _check_blocks(plan, own_table)
    for node in range(len(plan.parents)):
        _check_commit(plan, own_table, node)


@pytest.mark.parametrize("layout", [TreeLayout.PATHS, TreeLayout.MASK])
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_row_plan_shows_prompt_and_ancestors_to_every_node(parents, layout):
    for committed_len in COMMITTED_LENGTHS:
        plan, own_table = _plan(parents, committed_len, layout)
        assert plan.num_rows == num_rows(parents, layout)
        _check(plan, own_table)


@pytest.mark.parametrize("layout", [TreeLayout.PATHS, TreeLayout.MASK])
@pytest.mark.parametrize("block_size", [4, 32])
def test_row_plan_of_random_trees_shows_ancestors_and_can_be_kept(block_size, layout, seed, large_counts):
    generator = np.random.default_rng([seed, block_size])
    for case in range(2_000 if large_counts else 100):
        num_nodes = 40 if case % 25 == 0 else int(generator.integers(1, 13))
        parents = _random_parents(generator, num_nodes)
        committed_len = int(generator.integers(0, 3 * block_size + 2))
        plan, own_table = _plan(parents, committed_len, layout, block_size)
        assert plan.num_rows == num_rows(parents, layout)
        _check(plan, own_table)


@pytest.mark.parametrize("layout", list(TreeLayout))
@pytest.mark.parametrize("parents", [[-1], range(-1, 7), [-1, 0, 1, 2]], ids=["root", "range", "list"])
def test_chain_is_one_path_in_every_tree_layout(parents, layout):
    for committed_len in COMMITTED_LENGTHS:
        plan, own_table = _plan(parents, committed_len, layout)
        assert plan.layout is TreeLayout.CHAIN
        assert plan.copies == ()
        assert len(plan.paths) == 1
        assert plan.paths[0].mask is None
        assert len(plan.fresh_blocks) == blocks_for(committed_len + len(parents), 32) - len(own_table)
        _check(plan, own_table)


def test_tree_that_starts_at_a_block_border_copies_no_block():
    plan, _ = _plan(TREES["binary"], 64, TreeLayout.PATHS)
    assert plan.copies == ()
    plan, own_table = _plan(TREES["binary"], 65, TreeLayout.PATHS)
    assert [source for source, _ in plan.copies] == [own_table[-1]] * (len(plan.paths) - 1)


def test_num_rows_counts_shared_ancestors_once_per_leaf_in_paths_layout():
    parents = [-1, 0, 1, 1]
    assert num_rows(parents, TreeLayout.PATHS) == 6
    assert num_rows(parents, TreeLayout.MASK) == 4
    assert root_to_leaf_paths(parents) == [[0, 1, 2], [0, 1, 3]]


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


def test_chain_layout_rejects_a_branch_before_blocks_are_allocated():
    with pytest.raises(ValueError, match="cannot be laid out as a chain"):
        fresh_blocks_needed([-1, 0, 0], 5, 1, TreeLayout.CHAIN, 32)


@pytest.mark.parametrize("layout", [TreeLayout.PATHS, TreeLayout.MASK])
@pytest.mark.parametrize("node", [-1, 3, 40])
@pytest.mark.parametrize("parents", [[-1, 0, 1], [-1, 0, 0]], ids=["chain", "fork"])
def test_row_plan_commit_of_a_node_outside_the_tree_raises(parents, node, layout):
    plan, _ = _plan(parents, 5, layout)
    with pytest.raises(ValueError, match="not in the tree"):
        plan.commit(node)


@pytest.mark.parametrize("committed_len", [1, 31, 33, 63, 65])
def test_fault_of_an_uncopied_tail_block_in_a_row_plan_is_found(committed_len):
    plan, own_table = _plan(TREES["binary"], committed_len, TreeLayout.PATHS)
    with pytest.raises(AssertionError):
        _check_rows(replace(plan, copies=()), own_table)


def test_fault_of_a_row_plan_writing_to_a_shared_block_is_found():
    plan, own_table = _plan([-1, 0, 0], 33, TreeLayout.PATHS)
    intruder = plan.paths[1]._replace(block_table=plan.paths[0].block_table)
    with pytest.raises(AssertionError, match="overwrites another path's row"):
        _check_rows(replace(plan, paths=(plan.paths[0], intruder)), own_table)


def test_fault_of_a_tree_mask_that_shows_a_sibling_is_found():
    plan, own_table = _plan([-1, 0, 0], 33, TreeLayout.MASK)
    causal = plan.paths[0]._replace(mask=np.tri(3, dtype=np.bool_))
    with pytest.raises(AssertionError):
        _check_rows(replace(plan, paths=(causal,)), own_table)
