"""Native attention over long contexts and in every type of keys and values: rows that share blocks, and splits on several threads."""

from collections.abc import Sequence
from math import prod

import numpy as np
import pytest

from harness.attention_bench import NUM_BLOCKS, Bench, Random, blocks, random_tree
from harness.native_network import BUILT
from paceline.kv_cache.cache import BLOCK_SIZE
from paceline.kv_cache.row_plan import path_to, tree_mask
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.runtimes.base import FloatArray, IntArray, RowRange
from paceline.runtimes.native.library import kernels
from paceline.runtimes.native.network import KVBlockCodec

if not BUILT:
    pytest.skip("no native kernels for this machine", allow_module_level=True)

BY_LEVEL = pytest.mark.parametrize("level", BUILT)
BY_TYPE = pytest.mark.parametrize("kv_cache_dtype", KVCacheDtype, ids=lambda kv_cache_dtype: kv_cache_dtype.value)
BY_FLOAT_TYPE = pytest.mark.parametrize(
    "kv_cache_dtype", [KVCacheDtype.F32, KVCacheDtype.BF16, KVCacheDtype.F16], ids=lambda kv_cache_dtype: kv_cache_dtype.value
)
# Rounding error of q and the weights, in addition to that of the stored values; else the arithmetic of float32.
TOLERANCE = {KVCacheDtype.F32: 3e-6, KVCacheDtype.BF16: 2e-2, KVCacheDtype.F16: 5e-6, KVCacheDtype.INT8: 2e-2}


def stored_row(codec: KVBlockCodec, bench: Bench, block: int, row: int) -> tuple[FloatArray, FloatArray]:
    """Keys and values of a row as float32, each [layers, K, D rounded up to a multiple of 16]."""
    keys, values, *scales = codec.row_views(bench.storage, block, row)
    found = [part.reshape(*part.shape[:2], prod(part.shape[2:])) for part in (keys, values)]
    if codec.kv_cache_dtype is KVCacheDtype.BF16:
        found = [(part.astype(np.uint32) << 16).view(np.float32) for part in found]
    factors = [scale[..., None] for scale in scales] or [np.float32(1.0)] * 2
    return found[0].astype(np.float32) * factors[0], found[1].astype(np.float32) * factors[1]


def as_stored(bench: Bench, table: Sequence[int], count: int) -> tuple[FloatArray, FloatArray]:
    """Keys and values [count, K * D] of the first rows, as the cache keeps them."""
    rows, attention = KVBlockCodec(bench.kv_cache_dtype, BLOCK_SIZE), bench.config.attention
    found = [stored_row(rows, bench, int(table[slot // BLOCK_SIZE]), slot % BLOCK_SIZE) for slot in range(count)]
    keys, values = (np.stack([side[0, :, : attention.head_size].reshape(-1) for side in sides]) for sides in zip(*found, strict=True))
    return keys, values


def shuffled(random: Random, count: int, first: int = 0) -> IntArray:
    """A block table in no order."""
    return (first + random.permutation(count)).astype(np.int32)


def read(bench: Bench, rows: Sequence[FloatArray], sizes: Sequence[int], table: IntArray) -> FloatArray:
    """The results of a text's rows, in passes of these sizes."""
    found, start = [], 0
    for size in sizes:
        found.append(bench.attend([part[start : start + size] for part in rows], [RowRange(0, size, start, table)]))
        start += size
    return np.concatenate(found)


@pytest.mark.spread(0.3)
@BY_LEVEL
@BY_TYPE
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(4, 2, 64), (6, 1, 24), (2, 2, 5), (7, 1, 80)])
def test_long_context_attention_equals_its_definition_over_stored_kv(
    heads: int, kv_heads: int, head_size: int, kv_cache_dtype: KVCacheDtype, level: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    bench = Bench.make(heads, kv_heads, head_size, level=level, kv_cache_dtype=kv_cache_dtype, num_threads=2)
    table = shuffled(random, 24)
    rows = bench.rows(random, 700)
    found = read(bench, rows, (250, 3, 4, 300, 120, 23), table)
    keys, values = as_stored(bench, table, 700)
    for row in (0, 249, 255, 256, 257, 511, 512, 640, 699):
        expected = bench.expected(rows[0][row], keys[: row + 1], values[: row + 1])
        assert np.abs(found[row] - expected).max() <= TOLERANCE[kv_cache_dtype] * max(1.0, np.abs(values).max())


@BY_LEVEL
@BY_FLOAT_TYPE
def test_latent_attention_equals_its_definition_over_stored_keys(kv_cache_dtype: KVCacheDtype, level: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    bench = Bench.make(5, 1, 112, latent_size=96, level=level, kv_cache_dtype=kv_cache_dtype, num_threads=2)
    table, rows = shuffled(random, 24), bench.rows(random, 300)
    found = read(bench, rows, (250, 3, 47), table)
    codec = KVBlockCodec(kv_cache_dtype, BLOCK_SIZE, arrays_per_layer=1)
    keys = np.stack([stored_row(codec, bench, int(table[slot // BLOCK_SIZE]), slot % BLOCK_SIZE)[1][0, 0] for slot in range(300)])
    for row in (0, 249, 252, 256, 299):
        expected = bench.expected(rows[0][row], keys[: row + 1], keys[: row + 1])
        assert np.abs(found[row] - expected).max() <= TOLERANCE[kv_cache_dtype] * max(1.0, np.abs(keys).max())


@BY_FLOAT_TYPE
def test_latent_attention_is_bit_equal_in_chunks_in_trees_and_on_all_libraries(kv_cache_dtype: KVCacheDtype, seed: int) -> None:
    results = []
    for level, num_threads, sizes in (*((level, 1, (200, 90)) for level in BUILT), (BUILT[0], 2, (280, *[1] * 10)), (BUILT[0], 3, (290,))):
        random = np.random.default_rng(seed)
        bench = Bench.make(5, 1, 112, latent_size=96, level=level, kv_cache_dtype=kv_cache_dtype, num_threads=num_threads)
        results.append(read(bench, bench.rows(random, 290), sizes, shuffled(random, 20)))
    assert all(np.array_equal(result, results[0]) for result in results[1:])
    for cached_len in (0, 31, 250):
        assert differing_nodes(cached_len, kv_cache_dtype, BUILT[-1], seed, latent_size=96) == 0


@BY_LEVEL
@BY_FLOAT_TYPE
def test_attention_weights_sum_to_one_after_rounding(kv_cache_dtype: KVCacheDtype, level: str, seed: int) -> None:
    """So a value that all rows have in common comes back as it is, also where weights are rounded to 8 digits in front of products."""
    random = np.random.default_rng(seed)
    bench = Bench.make(4, 2, 24, level=level, kv_cache_dtype=kv_cache_dtype, num_threads=2)
    table = shuffled(random, 24)
    q, k, v = bench.rows(random, 560)
    q *= 3
    v[...] = np.where(np.arange(v.shape[1]) % 2, 0.75, -0.75)
    found = read(bench, (q, k, v), (550, 10), table)
    assert np.abs(found - np.tile(v, 2)).max() <= 2e-6


@BY_TYPE
def test_stored_keys_and_values_are_as_exact_as_their_dtype(kv_cache_dtype: KVCacheDtype, seed: int) -> None:
    bench = Bench.make(4, 2, 24, kv_cache_dtype=kv_cache_dtype)
    rows = bench.rows(np.random.default_rng(seed), 70)
    read(bench, rows, (40, 30), blocks(9, 3, 41))
    step = {KVCacheDtype.F32: 0.0, KVCacheDtype.BF16: 2**-8, KVCacheDtype.F16: 2**-11, KVCacheDtype.INT8: 0.5 / 127}[kv_cache_dtype]
    for given, stored in zip(rows[1:], as_stored(bench, blocks(9, 3, 41), 70), strict=True):
        by_head = np.abs(given.reshape(70, 2, 24))
        bound = by_head.max(-1, keepdims=True) if kv_cache_dtype is KVCacheDtype.INT8 else by_head
        assert (np.abs(given - stored).reshape(70, 2, 24) <= step * bound * 1.001).all()


@BY_TYPE
@pytest.mark.parametrize("window", [None, 40, 300])
def test_long_context_attention_is_bit_equal_for_chunks_and_single_rows(
    window: int | None, kv_cache_dtype: KVCacheDtype, seed: int
) -> None:
    """On all libraries, whatever the passes and the threads: the last rows of a long text, after the same rows."""
    random = np.random.default_rng(seed)
    results = []
    for level, num_threads, sizes in (
        *((level, 1, (200, 100, 250)) for level in BUILT),
        (BUILT[0], 2, (550,)),
        (BUILT[0], 3, (250, 1, 2, 3, 4, 40, 200, 50)),
        (BUILT[0], 2, (500, *[1] * 50)),
        (BUILT[0], 5, (255, 1, 1, 255, 1, 1, 36)),
    ):
        random = np.random.default_rng(seed)
        bench = Bench.make(6, 2, 48, level=level, kv_cache_dtype=kv_cache_dtype, num_threads=num_threads, window=window)
        results.append(read(bench, bench.rows(random, 550), sizes, shuffled(random, 20)))
    for result in results[1:]:
        assert np.array_equal(result, results[0])


@BY_LEVEL
@BY_TYPE
@pytest.mark.parametrize("cached_len", [0, 31, 250, 255, 256, 505])
def test_attention_of_a_tree_across_splits_is_bit_equal_to_its_paths(
    cached_len: int, kv_cache_dtype: KVCacheDtype, level: str, seed: int
) -> None:
    assert differing_nodes(cached_len, kv_cache_dtype, level, seed) == 0


def differing_nodes(
    cached_len: int, kv_cache_dtype: KVCacheDtype, level: str, seed: int, window: int | None = None, *, shift: int = 0, latent_size: int = 0
) -> int:
    random, heads = np.random.default_rng(seed + cached_len), (5, 1, 112) if latent_size else (4, 2, 24)
    bench = Bench.make(*heads, latent_size=latent_size, level=level, kv_cache_dtype=kv_cache_dtype, num_threads=2, window=window)
    prefix, size = bench.rows(random, cached_len), int(random.integers(8, 40))
    tree, parents = bench.rows(random, size), random_tree(random, size)
    tables = shuffled(random, 20), shuffled(random, 20, first=20)
    for table in tables:
        if cached_len:
            bench.attend(prefix, [RowRange(0, cached_len, 0, table)])
    found = bench.attend(tree, [RowRange(0, size, cached_len, tables[0], tree_mask(parents))])
    differing = 0
    for node in random.permutation(size)[:5].tolist():
        for depth, step in enumerate(path_to(parents, node)):
            row = [part[step : step + 1] for part in tree]
            alone = bench.attend(row, [RowRange(0, 1, cached_len + depth + shift, tables[1])])
        differing += not np.array_equal(alone[0], found[node])
    return differing


@BY_TYPE
@pytest.mark.parametrize("window", [7, 64])
def test_attention_of_a_tree_with_a_window_is_bit_equal_to_its_paths(window: int, kv_cache_dtype: KVCacheDtype, seed: int) -> None:
    assert sum(differing_nodes(cached_len, kv_cache_dtype, BUILT[0], seed, window) for cached_len in (3, 250, 256, 300)) == 0


def test_fault_of_shifted_attention_positions_is_found(seed: int) -> None:
    assert differing_nodes(250, KVCacheDtype.BF16, BUILT[0], seed, shift=1) > 0


@BY_TYPE
@pytest.mark.parametrize("first_slot", [1, 33, 256, 300])
def test_attention_slots_before_first_slot_are_masked(first_slot: int, kv_cache_dtype: KVCacheDtype, seed: int) -> None:
    bench = Bench.make(4, 2, 16, kv_cache_dtype=kv_cache_dtype, num_threads=2)
    random = np.random.default_rng(seed)
    rows, table = bench.rows(random, 400), shuffled(random, 20)
    found = [
        read(bench, rows, (390,), table) is not None
        and bench.attend([part[390:] for part in rows], [RowRange(0, 10, 390, table, None, first)])
        for first in (0, first_slot)
    ]
    bench.attend([part[:first_slot] * 100 for part in rows], [RowRange(0, first_slot, 0, table)])
    again = bench.attend([part[390:] for part in rows], [RowRange(0, 10, 390, table, None, first_slot)])
    assert np.array_equal(again, found[1])
    assert not np.array_equal(found[0], found[1])


@BY_TYPE
def test_copied_kv_row_reads_the_same(kv_cache_dtype: KVCacheDtype, seed: int) -> None:
    bench = Bench.make(4, 2, 24, kv_cache_dtype=kv_cache_dtype)
    rows = bench.rows(np.random.default_rng(seed), 40)
    read(bench, rows, (40,), blocks(5, 7))
    packed = KVBlockCodec(kv_cache_dtype, BLOCK_SIZE)
    before = stored_row(packed, bench, 5, 18)
    untouched = [stored_row(packed, bench, 7, row) for row in range(8)]
    packed.copy_row(bench.storage, (5, 18), (7, 3))
    assert all(np.array_equal(one, other, equal_nan=True) for one, other in zip(stored_row(packed, bench, 7, 3), before, strict=True))
    for row in (0, 1, 2, 4, 5, 6, 7):
        assert all(
            np.array_equal(one, other, equal_nan=True) for one, other in zip(stored_row(packed, bench, 7, row), untouched[row], strict=True)
        )


@BY_TYPE
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_value_in_the_kv_cache_reaches_the_output(bad: float, kv_cache_dtype: KVCacheDtype, seed: int) -> None:
    bench = Bench.make(2, 1, 16, kv_cache_dtype=kv_cache_dtype)
    q, k, v = bench.rows(np.random.default_rng(seed), 20)
    v[3, 0] = bad
    found = bench.attend([q, k, v], [RowRange(0, 20, 0, blocks(1))])
    assert np.isfinite(found[:3]).all()
    assert not np.isfinite(found[3:, 0]).any()


def test_kernels_and_python_agree_on_kv_row_sizes() -> None:
    for code, kv_cache_dtype in enumerate(KVCacheDtype):
        for head_size in (5, 16, 24, 64, 80, 128, 256):
            assert kernels().paceline_head_block_bytes(code, head_size) == BLOCK_SIZE * kv_cache_dtype.row_bytes(head_size)
    assert NUM_BLOCKS * BLOCK_SIZE >= 700
