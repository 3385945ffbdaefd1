"""Native attention: its definition in float64, whatever the blocks, and the bits of decoding alone, whatever the mask."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from harness.attention_bench import Bench, blocks, random_tree
from harness.native_network import BUILT, Network, make_batch
from paceline.kv_cache.row_plan import path_to, tree_mask
from paceline.runtimes.base import FloatArray, RowRange

BY_LEVEL = pytest.mark.parametrize("level", BUILT)


@BY_LEVEL
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"), [(4, 4, 16), (4, 2, 24), (6, 1, 64), (8, 2, 80), (3, 3, 128), (2, 1, 256), (2, 2, 5)]
)
def test_native_attention_equals_its_definition(
    heads: int, kv_heads: int, head_size: int, cap: float | None, level: str, seed: int
) -> None:
    """Two chunks and a lone row; the blocks lie in no order."""
    bench = Bench.make(heads, kv_heads, head_size, cap=cap, level=level)
    q, k, v = bench.rows(np.random.default_rng(seed), 70)
    table = blocks(9, 3, 41)
    for start, end in ((0, 40), (40, 69), (69, 70)):
        found = bench.attend([part[start:end] for part in (q, k, v)], [RowRange(0, end - start, start, table)])
        for row in range(start, end):
            assert np.abs(found[row - start] - bench.expected(q[row], k[: row + 1], v[: row + 1])).max() <= 3e-6
    assert np.isfinite(bench.storage.view(np.float32)).sum() == 2 * 70 * kv_heads * head_size


@BY_LEVEL
@pytest.mark.parametrize("window", [1, 15, 33, 70, 100])
def test_native_attention_window_limits_rows_to_their_last_positions(window: int, level: str, seed: int) -> None:
    """In chunks, one by one, and in a tree, where the window counts the positions of a node's own path."""
    bench = Bench.make(4, 2, 24, window=window, level=level)
    random = np.random.default_rng(seed)
    q, k, v = bench.rows(random, 70)
    table = blocks(9, 3, 41, 7)
    for start, end in ((0, 40), (40, 69), (69, 70)):
        found = bench.attend([part[start:end] for part in (q, k, v)], [RowRange(0, end - start, start, table)])
        for row in range(start, end):
            seen = slice(max(0, row + 1 - window), row + 1)
            assert np.abs(found[row - start] - bench.expected(q[row], k[seen], v[seen])).max() <= 3e-6
    parents = [-1, 0, 0, 2, 2, 1, 3, 6, 7]
    tree = bench.rows(random, len(parents))
    found = bench.attend(tree, [RowRange(0, len(parents), 70, table, tree_mask(parents))])
    for node in range(len(parents)):
        path = path_to(parents, node)
        keys, values = (np.concatenate((all_rows, own[path]))[-window:] for all_rows, own in ((k, tree[1]), (v, tree[2])))
        assert np.abs(found[node] - bench.expected(tree[0][node], keys, values)).max() <= 3e-6


@BY_LEVEL
@pytest.mark.parametrize("cached_len", [0, 1, 15, 16, 30, 31, 32, 33, 63, 64, 65])
def test_native_attention_row_is_bit_equal_alone_and_in_a_chunk(cached_len: int, level: str, seed: int) -> None:
    bench = Bench.make(4, 2, 16, level=level)
    qkv = bench.rows(np.random.default_rng(seed), cached_len + 4)
    whole = bench.attend(qkv, [RowRange(0, cached_len + 4, 0, blocks(1, 2, 3))])
    for row in range(cached_len, cached_len + 4):
        alone = bench.attend([part[row : row + 1] for part in qkv], [RowRange(0, 1, row, blocks(1, 2, 3))])
        assert np.array_equal(alone[0], whole[row])
        assert np.abs(alone[0] - bench.expected(qkv[0][row], qkv[1][: row + 1], qkv[2][: row + 1])).max() <= 3e-6


def compare_trees(level: str, seed: int, mask_of: Callable[[Sequence[int]], np.ndarray] = tree_mask, num_trees: int = 12) -> int:
    """Masked rows that differ from decoding their path alone, each node in slots of its own after the same prefix."""
    random = np.random.default_rng(seed)
    bench = Bench.make(4, 2, 24, level=level, num_threads=2)
    differing = 0
    for _ in range(num_trees):
        cached_len, size = int(random.integers(0, 66)), int(random.integers(2, 40))
        prefix, tree = bench.rows(random, max(cached_len, 1)), bench.rows(random, size)
        parents = random_tree(random, size)
        for table in (blocks(1, 2, 3, 4), blocks(5, 6, 7, 8)):
            if cached_len:
                bench.attend(prefix, [RowRange(0, cached_len, 0, table)])
        found = bench.attend(tree, [RowRange(0, size, cached_len, blocks(1, 2, 3, 4), mask_of(parents))])
        for node in random.permutation(size)[:6].tolist():
            for depth, step in enumerate(path_to(parents, node)):
                row = [part[step : step + 1] for part in tree]
                alone = bench.attend(row, [RowRange(0, 1, cached_len + depth, blocks(5, 6, 7, 8))])
            differing += not np.array_equal(alone[0], found[node])
    return differing


@BY_LEVEL
def test_native_attention_tree_row_is_bit_equal_to_its_path_decoded_alone(level: str, seed: int) -> None:
    assert compare_trees(level, seed) == 0


def test_native_attention_with_any_mask_equals_its_definition(seed: int) -> None:
    """Rows that attend to later ones as well, and two masked ranges together with a causal one."""
    random = np.random.default_rng(seed)
    bench = Bench.make(4, 2, 16)
    sizes, tables = (7, 3, 5), (blocks(1), blocks(2), blocks(3))
    masks = [(random.random((size, size)) < 0.5) | np.eye(size, dtype=np.bool_) for size in sizes]
    qkv = bench.rows(random, sum(sizes))
    ranges, start = [], 0
    for size, table, mask in zip(sizes, tables, (masks[0], None, masks[2]), strict=True):
        ranges.append(RowRange(start, size, 0, table, mask))
        start += size
    found = bench.attend(qkv, ranges)
    for item in ranges:
        visible = np.tri(item.num_rows, dtype=np.bool_) if item.mask is None else item.mask
        k, v = (part[item.start : item.start + item.num_rows] for part in qkv[1:])
        for index in range(item.num_rows):
            expected = bench.expected(qkv[0][item.start + index], k[visible[index]], v[visible[index]])
            assert np.abs(found[item.start + index] - expected).max() <= 3e-6


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 5, 17, 40])
def test_native_attention_of_sequences_in_one_pass_is_independent(count: int, num_threads: int, seed: int) -> None:
    """A lone row, a chunk or a tree each, after prefixes of their own, against the same work pass by pass."""
    random = np.random.default_rng(seed)
    together, apart = (Bench.make(4, 2, 16, num_threads=threads) for threads in (num_threads, 1))
    work, ranges, start = [], [], 0
    for index in range(count):
        cached_len, size = int(random.integers(1, 20)), int(random.choice([1, 1, 3, 9]))
        prefix = together.rows(random, cached_len)
        mask = tree_mask(random_tree(random, size)) if index % 3 == 2 else None
        for bench in (together, apart):
            bench.attend(prefix, [RowRange(0, cached_len, 0, blocks(index + 1))])
        work.append(together.rows(random, size))
        ranges.append(RowRange(start, size, cached_len, blocks(index + 1), mask))
        start += size
    found = together.attend([np.concatenate(parts) for parts in zip(*work, strict=True)], ranges)
    for rows, item in zip(work, ranges, strict=True):
        alone = apart.attend(rows, [RowRange(0, item.num_rows, item.cached_len, item.block_table, item.mask)])
        assert np.array_equal(found[item.start : item.start + item.num_rows], alone)
    assert np.array_equal(together.storage, apart.storage)


@BY_LEVEL
def test_large_attention_scores_do_not_overflow(level: str, seed: int) -> None:
    bench = Bench.make(2, 1, 16, level=level)
    q, k, v = bench.rows(np.random.default_rng(seed), 90)
    q *= 1000
    found = bench.attend([q, k, v], [RowRange(0, 90, 0, blocks(1, 2, 3))])
    for row in range(90):
        assert np.abs(found[row] - bench.expected(q[row], k[: row + 1], v[: row + 1])).max() <= 1e-3


def test_nan_attention_score_makes_its_row_nan(seed: int) -> None:
    bench = Bench.make(2, 1, 16)
    q, k, v = bench.rows(np.random.default_rng(seed), 20)
    k[3, 0] = np.nan
    found = bench.attend([q, k, v], [RowRange(0, 20, 0, blocks(1))])
    assert np.isfinite(found[:3]).all()
    assert np.isnan(found[3:]).all()


# Planted faults: each must be seen by the comparisons above.


def test_fault_of_an_ignored_attention_mask_is_found(seed: int) -> None:
    assert compare_trees(BUILT[0], seed, lambda parents: np.tri(len(parents), dtype=np.bool_)) > 0


def test_fault_of_an_attention_mask_with_another_path_is_found(seed: int) -> None:
    def with_a_stranger(parents: Sequence[int]) -> np.ndarray:
        mask = tree_mask(parents)
        strangers = np.argwhere(~mask & np.tri(len(parents), dtype=np.bool_))
        if len(strangers):
            mask[strangers[-1][0], strangers[-1][1]] = True
        return mask

    assert compare_trees(BUILT[0], seed, with_a_stranger, num_trees=40) > 0


def test_fault_of_attention_keys_in_the_wrong_slot_is_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Bench.attend

    def one_slot_later(bench: Bench, qkv: Sequence[FloatArray], ranges: Sequence[RowRange]) -> FloatArray:
        moved = [
            RowRange(item.start, item.num_rows, item.cached_len + (item.mask is not None), item.block_table, item.mask) for item in ranges
        ]
        return real(bench, qkv, moved)

    monkeypatch.setattr(Bench, "attend", one_slot_later)
    assert compare_trees(BUILT[0], seed) > 0


def test_attention_layer_with_shared_kv_reads_and_never_writes_it(seed: int) -> None:
    bench, random = Bench.make(4, 2, 16, num_threads=2), np.random.default_rng(seed)
    rows = [RowRange(0, 40, 0, np.array([3, 1], np.int32))]
    q, k, v = bench.rows(random, 40)
    expected = bench.attend([q, k, v], rows).copy()
    shared = replace(bench.config.attention, kv_source_layer=0)
    reader = Network([64], lambda blocks, inputs: [blocks.attention(inputs[0], None, shared, 1)], config=bench.config, num_threads=2)
    reader.execution.set_cache([*bench.storage, *np.full((2, 1, 1), 0xFF, np.uint8)])
    written = bench.storage.copy()
    assert np.array_equal(reader(q, batch=make_batch(rows))[0], expected)
    assert np.array_equal(bench.storage, written)
