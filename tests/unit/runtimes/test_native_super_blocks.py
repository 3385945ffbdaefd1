"""K-quants at their stored size: the values of the format's own library, and the bits of products with scales stored as float32."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.gguf_checkpoints import HALVES, random_blocks
from harness.native_network import BUILT, Network, plain_tensor
from paceline.models.config import WeightType
from paceline.models.gguf.blocks import convert_to_grouped_matrix
from paceline.models.gguf.header import BLOCK_TYPES, BlockType
from paceline.models.grouped import GroupedMatrix
from paceline.models.layers import DenseMLP, ExpertMLP, ExpertRouting
from paceline.models.weights import GroupedTensor, Weights
from paceline.runtimes.base import FloatArray
from paceline.runtimes.native.packed_weights import PackedWeights, pack_weights
from paceline.runtimes.native.records import PANEL_KINDS, MatrixKind, Packing
from paceline.runtimes.native.weights import NativeWeights

gguf = pytest.importorskip("gguf")

KINDS = {name: MatrixKind[f"PANELS_{name}"] for name in ("Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_XS")}
OUTPUTS, COLUMNS, MAX_ROWS = 53, 768, 43
BY_TYPE = pytest.mark.parametrize("name", KINDS)
BY_LEVEL = pytest.mark.parametrize("level", BUILT)
BY_BLOCK = pytest.mark.parametrize("block", [256, 128])


def block_type(name: str) -> BlockType:
    return next(one for one in BLOCK_TYPES.values() if one.name == name)


def raw_blocks(random: np.random.Generator, name: str, outputs: int = OUTPUTS, columns: int = COLUMNS) -> NDArray[np.uint8]:
    """Random blocks; those of the first four outputs have all bits set, none, or every other one."""
    raw = random_blocks(random, name, outputs, columns, scale=0.01)
    extremes = raw[:4].reshape(4, -1, block_type(name).num_bytes)
    halves = {start: extremes[:, :, start : start + 2].copy() for start in HALVES[name]}
    extremes[...] = np.array([0, 0xFF, 0x55, 0xAA], np.uint8)[: len(extremes), None, None]
    for start, numbers in halves.items():
        extremes[:, :, start : start + 2] = numbers
    return raw


def stored(name: str, raw: NDArray[np.uint8], block: int = 256) -> GroupedMatrix:
    """The matrix; with blocks of 128 columns, its halves of super-blocks are in another order."""
    matrix = convert_to_grouped_matrix(raw, block_type(name), name)
    return matrix if block == 256 else matrix.reorder_runs(half_order(matrix.shape[1]))


def half_order(columns: int) -> NDArray[np.int64]:
    """Runs of 32 columns: all first halves of super-blocks, then all second ones, so that most new neighbours had other numbers."""
    return np.arange(columns // 32).reshape(-1, 2, 4).swapaxes(0, 1).reshape(-1)


def run(matrix: GroupedMatrix, rows: FloatArray, *, level: str | None = None, num_threads: int = 1) -> FloatArray:
    """Its product with rows rounded to bytes, with a bias."""
    bias = np.random.default_rng(1).normal(size=matrix.shape[0]).astype(np.float32)
    network = Network(
        [matrix.shape[1]], lambda blocks, inputs: blocks.linear(inputs[0], "a"),
        tensors={"a.weight": GroupedTensor(matrix), "a.bias": plain_tensor(bias)},
        num_threads=num_threads, level=level, packed=True,
    )  # fmt: skip
    assert network.packings == [Packing.BYTES]
    return network(rows)[0]


def rows_of(random: np.random.Generator, num_rows: int, columns: int = COLUMNS) -> FloatArray:
    return (random.normal(size=(num_rows, columns)) * np.exp(random.normal(size=(num_rows, columns)))).astype(np.float32)


@pytest.mark.spread(0.3)
@BY_LEVEL
@BY_BLOCK
@BY_TYPE
def test_super_block_products_equal_those_with_float32_scales(name: str, block: int, level: str, seed: int) -> None:
    """One to 43 rows (of blocks of four, eight at once, then two, and three rows), and numbers of outputs that are no whole panels."""
    random = np.random.default_rng(seed)
    matrix, rows = stored(name, raw_blocks(random, name), block), rows_of(random, MAX_ROWS)
    expected = run(replace(matrix, super_blocks=None), rows, level=level)
    assert np.isfinite(expected).all()
    assert expected.any(axis=0).all()
    for count in (*range(1, 10), 13, 16, 20, MAX_ROWS):
        first = int(random.integers(0, MAX_ROWS - count + 1))
        assert np.array_equal(run(matrix, rows[first : first + count], level=level), expected[first : first + count]), count


@BY_LEVEL
@BY_TYPE
def test_super_block_products_of_extreme_values_are_exact(name: str, level: str, seed: int) -> None:
    """Sums of products are as large as they can be, of either sign."""
    random = np.random.default_rng(seed)
    matrix, rows = stored(name, raw_blocks(random, name)), np.ones((4, COLUMNS), np.float32)
    rows[1], rows[2, ::2], rows[3, COLUMNS // 2 :] = -1.0, -1.0, -1.0
    expected = run(replace(matrix, super_blocks=None), rows, level=level)
    for row in range(len(rows)):
        assert np.array_equal(run(matrix, rows[row:], level=level), expected[row:]), row


@pytest.mark.skipif(len(BUILT) < 2, reason="this machine has one instruction set we build for")
@BY_TYPE
def test_super_block_product_bits_are_equal_on_every_instruction_set(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    matrix, rows = stored(name, raw_blocks(random, name)), rows_of(random, 9)
    best, *others = (run(matrix, rows, level=level) for level in BUILT)
    assert all(np.array_equal(best, other) for other in others)


@BY_TYPE
@pytest.mark.parametrize("num_rows", [1, 8])
def test_super_block_product_bits_are_independent_of_threads(name: str, num_rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    matrix, rows = stored(name, raw_blocks(random, name, 300, 256)), rows_of(random, num_rows, 256)
    alone, *others = (run(matrix, rows, num_threads=count) for count in (1, 2, 3))
    assert all(np.array_equal(alone, other) for other in others)


@BY_TYPE
def test_super_block_experts_equal_those_with_float32_scales(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    mlp = ExpertMLP(routing=ExpertRouting(num_experts=5, num_experts_per_token=2), expert=DenseMLP(intermediate_size=512))
    shapes = {"gate_proj": (512, 256), "up_proj": (512, 256), "down_proj": (256, 512)}
    matrices = {
        f"experts.{expert}.{part}.weight": stored(name, random_blocks(random, name, *shape, scale=1e-4))
        for expert in range(5)
        for part, shape in shapes.items()
    }
    rows, logits = rows_of(random, 9, 256), rows_of(random, 9, 5)

    def mixed(matrices: dict[str, GroupedMatrix], num_rows: int) -> FloatArray:
        network = Network(
            [256, 5], lambda blocks, inputs: [blocks.experts(*inputs, mlp, "")],
            tensors={name: GroupedTensor(matrix) for name, matrix in matrices.items()}, num_threads=2, packed=True,
        )  # fmt: skip
        return network(rows[:num_rows], logits[:num_rows])[0]

    expected = mixed({name: replace(matrix, super_blocks=None) for name, matrix in matrices.items()}, 9)
    assert np.isfinite(expected).all()
    assert expected.any()
    for num_rows in (1, 9):
        assert np.array_equal(mixed(matrices, num_rows), expected[:num_rows])


@BY_TYPE
def test_super_block_embedding_is_kept_in_panels(name: str, seed: int) -> None:
    """An embedding that no product reads; other tables stay as they are."""
    matrix = stored(name, raw_blocks(np.random.default_rng(seed), name))
    tables = Weights({"a.weight": GroupedTensor(matrix), "b.weight": GroupedTensor(replace(matrix, super_blocks=None))})
    weights = NativeWeights(tables, WeightType.F32, packed={})
    found, numbers = weights.lookup_table("a"), np.array([0, 5, 52], np.int32)
    assert isinstance(found, PackedWeights)
    assert np.array_equal(found.rows(numbers), matrix.values(numbers))
    assert weights.lookup_table("b") is tables["b.weight"]
    assert NativeWeights(tables, WeightType.F32).lookup_table("a") is tables["a.weight"]


@BY_TYPE
@BY_BLOCK
def test_super_block_panel_rows_equal_the_dequantised_blocks(name: str, block: int, seed: int) -> None:
    raw = raw_blocks(np.random.default_rng(seed), name)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    if block == 128:
        expected = expected.reshape(OUTPUTS, -1, 32)[:, half_order(COLUMNS)].reshape(OUTPUTS, COLUMNS)
    panels, numbers = pack_weights(stored(name, raw, block), 2), np.array([52, 0, 15, 16, 0, 31, 1], np.int32)
    assert (panels.kind, panels.scale_columns) == (KINDS[name], block)
    assert panels.kind in PANEL_KINDS
    assert np.array_equal(panels.rows(numbers).view(np.uint32), expected[numbers].view(np.uint32))


@BY_TYPE
@BY_BLOCK
def test_super_block_panels_take_the_predicted_memory(name: str, block: int, seed: int) -> None:
    raw = raw_blocks(np.random.default_rng(seed), name, 64)
    matrix = stored(name, raw, block)
    assert pack_weights(matrix, 1).data.nbytes == matrix.nbytes
    assert raw.nbytes <= matrix.nbytes < (1.03 if block == 256 else 1.05) * raw.nbytes
    assert matrix.take_rows(slice(16)).nbytes == matrix.nbytes // 4


@BY_TYPE
def test_super_blocks_split_by_a_column_order_get_float32_scales(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    raw, rows = raw_blocks(random, name), rows_of(random, 3)
    runs = random.permutation(COLUMNS // 32)
    matrix = convert_to_grouped_matrix(raw, block_type(name), name).reorder_runs(runs)
    assert matrix.super_blocks is None
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]).reshape(OUTPUTS, -1, 32)[:, runs].reshape(OUTPUTS, COLUMNS)
    assert np.array_equal(pack_weights(matrix, 1).rows(np.arange(OUTPUTS, dtype=np.int32)), expected)
    assert run(matrix, rows).shape == (3, OUTPUTS)
