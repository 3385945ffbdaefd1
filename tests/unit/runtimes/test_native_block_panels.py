"""Blocks of a GGUF file that the kernels lay out as panels: byte for byte the panels of their groups, which numpy makes."""

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.gguf_checkpoints import HALVES, random_blocks, write_half
from harness.native_network import BUILT, open_kernels
from paceline.errors import CheckpointError
from paceline.models.gguf.blocks import QUANTIZED_BLOCK_TYPES, TYPES_WITHOUT_NATIVE_KERNEL, StoredBlocks
from paceline.models.gguf.header import BLOCK_TYPES, BlockType
from paceline.runtimes.native import packed_weights
from paceline.runtimes.native.packed_weights import PackedWeights, pack_gguf_blocks, pack_weights
from paceline.runtimes.native.records import MatrixKind

pytest.importorskip("gguf")

OUTPUTS, COLUMNS = 83, 768
TABLE, FLOAT16 = MatrixKind.PANELS_4_BITS_TABLE, MatrixKind.PANELS_4_BITS_TABLE_FLOAT16
BY_TYPE = pytest.mark.parametrize("name", QUANTIZED_BLOCK_TYPES)


def block_type(name: str) -> BlockType:
    return next(one for one in BLOCK_TYPES.values() if one.name == name)


def blocks_of(random: np.random.Generator, name: str, outputs: int = OUTPUTS, columns: int = COLUMNS) -> StoredBlocks:
    return StoredBlocks(random_blocks(random, name, outputs, columns, scale=0.01), block_type(name), "the tensor")


def same(one: PackedWeights, other: PackedWeights) -> bool:
    facts = [(own.kind, own.outputs, own.columns, own.group_size, own.zero_point, own.scale_columns) for own in (one, other)]
    return facts[0] == facts[1] and np.array_equal(one.data, other.data)


def run_orders(random: np.random.Generator) -> list[NDArray[np.int64] | None]:
    """None, halves of super-blocks, and runs that tear them apart."""
    runs = np.arange(COLUMNS // 32)
    return [None, random.permutation(runs.reshape(-1, 4)).reshape(-1), random.permutation(runs)]


@BY_TYPE
@pytest.mark.parametrize("num_threads", [1, 2])
def test_gguf_panels_equal_converted_groups_in_any_row_and_column_order(name: str, num_threads: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    plain = blocks_of(random, name)
    for order in (None, random.permutation(OUTPUTS), random.integers(0, OUTPUTS, 40)):
        for runs in run_orders(random):
            blocks = StoredBlocks(plain.raw, plain.block_type, plain.stored_name, order, runs)
            assert same(pack_gguf_blocks(blocks, num_threads), pack_weights(blocks.to_grouped_matrix(), 1)), (order is None, runs)


@BY_TYPE
def test_gguf_panels_are_right_for_sizes_that_fill_no_panel(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    for outputs, columns in ((1, 256), (15, 512), (17, 256), (300, 256)):
        blocks = blocks_of(random, name, outputs, columns)
        assert same(pack_gguf_blocks(blocks, 2), pack_weights(blocks.to_grouped_matrix(), 1)), (outputs, columns)


@BY_TYPE
def test_gguf_panels_are_packed_from_strided_rows(name: str, seed: int) -> None:
    """Every other row of a tensor, as experts and stacks of projections are views of one."""
    plain = blocks_of(np.random.default_rng(seed), name)
    blocks = StoredBlocks(plain.raw[::2], plain.block_type, plain.stored_name)
    assert same(pack_gguf_blocks(blocks, 1), pack_weights(blocks.to_grouped_matrix(), 1))


@pytest.mark.parametrize("name", [name for name in QUANTIZED_BLOCK_TYPES if block_type(name).num_items == 32])
def test_gguf_panels_are_packed_from_an_odd_number_of_groups(name: str, seed: int) -> None:
    blocks = blocks_of(np.random.default_rng(seed), name, 20, 96)
    assert same(pack_gguf_blocks(blocks, 1), pack_weights(blocks.to_grouped_matrix(), 1))


@pytest.mark.parametrize("level", BUILT[1:])
def test_gguf_panels_are_equal_on_every_instruction_set(level: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(seed)
    all_blocks = [blocks_of(random, name) for name in QUANTIZED_BLOCK_TYPES]
    best = [pack_gguf_blocks(blocks, 1) for blocks in all_blocks]
    library = open_kernels(level)
    monkeypatch.setattr(packed_weights, "kernels", lambda: library)
    for blocks, expected in zip(all_blocks, best, strict=True):
        assert same(pack_gguf_blocks(blocks, 1), expected), blocks.block_type.name


@BY_TYPE
@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_non_finite_gguf_scale_is_refused_with_its_row(name: str, number: float, seed: int) -> None:
    blocks = blocks_of(np.random.default_rng(seed), name)
    last = blocks.raw.shape[1] - block_type(name).num_bytes
    if name == "NVFP4":
        pytest.skip("each of its scales is finite")
    if name == "MXFP4":
        blocks.raw[61, last] = 255
    else:
        write_half(blocks.raw[61:62, last:], name, HALVES[name][-1], np.array([number], "<f2"))
    rows = "0 to 82" if name in TYPES_WITHOUT_NATIVE_KERNEL else "61 to 61"
    with pytest.raises(CheckpointError, match=f"the tensor has a scale that is not finite in rows {rows}; download the file"):
        pack_gguf_blocks(blocks, 2)


@pytest.mark.parametrize(
    ("exponent", "kind"), [(0, TABLE), (1, TABLE), (103, TABLE), (104, FLOAT16), (143, FLOAT16), (144, TABLE), (200, TABLE)]
)
def test_mxfp4_panel_scales_are_float16_if_all_fit(exponent: int, kind: MatrixKind, seed: int) -> None:
    blocks = blocks_of(np.random.default_rng(seed), "MXFP4")
    blocks.raw[40, 17] = exponent
    found = pack_gguf_blocks(blocks, 1)
    assert found.kind == kind
    assert same(found, pack_weights(blocks.to_grouped_matrix(), 1))
    assert np.array_equal(found.rows(np.array([40, 3], np.int32)), blocks.to_grouped_matrix().values(np.array([40, 3], np.int32)))
