"""Every block type becomes groups whose values are, bit for bit, those of the format's own library."""

import sys

import numpy as np
import pytest

from harness.gguf_checkpoints import HALVES, dequantize, random_blocks, write_half
from paceline.errors import BackendUnavailableError, CheckpointError
from paceline.models.gguf import blocks as gguf_blocks
from paceline.models.gguf import codebook_blocks
from paceline.models.gguf.blocks import QUANTIZED_BLOCK_TYPES, convert_to_grouped_matrix, grouped_matrix_size
from paceline.models.gguf.header import BLOCK_TYPES, BlockType
from paceline.models.grouped import GroupedMatrix

gguf = pytest.importorskip("gguf")

NUM_ROWS, COLUMNS = 37, 512
BY_TYPE = pytest.mark.parametrize("name", QUANTIZED_BLOCK_TYPES)


def block_type(name: str) -> BlockType:
    return next(one for one in BLOCK_TYPES.values() if one.name == name)


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32)


@BY_TYPE
def test_gguf_block_values_equal_the_gguf_package_bit_by_bit(name: str, seed: int, large_counts: bool) -> None:
    rng = np.random.default_rng(seed)
    for round_index in range(100 if large_counts else 3):
        raw = random_blocks(rng, name, NUM_ROWS, COLUMNS, scale=10.0 ** (round_index % 5 - 3))
        expected = dequantize(raw, name)
        matrix = convert_to_grouped_matrix(raw, block_type(name), "x")
        assert matrix.shape == (NUM_ROWS, COLUMNS)
        assert np.array_equal(bits(matrix.values()), bits(expected))


@BY_TYPE
def test_extreme_gguf_block_values_equal_the_gguf_package(name: str) -> None:
    """All bits set, none set, and the largest and smallest numbers of float16."""
    for byte in (0, 0xFE if name == "MXFP4" else 0xFF, 0x55, 0xAA):  # its scale 0xFF is no number
        for number in (0.0, -0.0, 6e-8, 65504.0, -65504.0):
            blocks = np.full((1, 2, block_type(name).num_bytes), byte, np.uint8)
            for start in HALVES[name]:
                write_half(blocks, name, start, np.full((1, 2), number, "<f2"))
            raw = blocks.reshape(1, -1)
            with np.errstate(over="ignore"):
                expected = dequantize(raw, name)
                found = convert_to_grouped_matrix(raw, block_type(name), "x").values()
            assert np.array_equal(bits(found), bits(expected)), (byte, number)


@BY_TYPE
def test_gguf_weight_rows_can_be_permuted(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    raw, order = random_blocks(rng, name, NUM_ROWS, COLUMNS), rng.permutation(NUM_ROWS)
    assert np.array_equal(
        convert_to_grouped_matrix(raw, block_type(name), "x", order).values(),
        convert_to_grouped_matrix(raw, block_type(name), "x").values()[order],
    )


@BY_TYPE
def test_gguf_blocks_converted_in_chunks_are_equal(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(np.random.default_rng(seed), name, NUM_ROWS, COLUMNS)
    whole = convert_to_grouped_matrix(raw, block_type(name), "x")
    monkeypatch.setattr(gguf_blocks, "_WEIGHTS_PER_CHUNK", 3 * COLUMNS)
    assert same(convert_to_grouped_matrix(raw, block_type(name), "x"), whole)


@BY_TYPE
def test_gguf_converted_size_is_known_before_conversion(name: str, seed: int) -> None:
    raw = random_blocks(np.random.default_rng(seed), name, NUM_ROWS, COLUMNS)
    made = convert_to_grouped_matrix(raw, block_type(name), "x")
    assert (made.bits, made.nbytes) == grouped_matrix_size((NUM_ROWS, COLUMNS), block_type(name), "x")


@BY_TYPE
@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_gguf_block_scale_that_is_not_finite_is_refused(name: str, number: float, seed: int) -> None:
    raw = random_blocks(np.random.default_rng(seed), name, NUM_ROWS, COLUMNS)
    begin = 5 * block_type(name).num_bytes if raw.shape[1] > 5 * block_type(name).num_bytes else 0
    if name == "NVFP4":
        pytest.skip("each of its scales is finite")
    if name == "MXFP4":
        raw[30, begin] = 255
    else:
        block = raw[30:31, begin : begin + block_type(name).num_bytes]
        write_half(block, name, HALVES[name][0], np.array([number], "<f2"))
    with pytest.raises(CheckpointError, match=r"the tensor has a scale that is not finite in rows"):
        convert_to_grouped_matrix(raw, block_type(name), "the tensor")


def test_unsupported_gguf_block_type_error_lists_the_supported_ones() -> None:
    with pytest.raises(
        CheckpointError, match=r"x is of type Q8_K; supported are F32, F16, BF16, Q4_0, .*IQ4_XS, MXFP4, .*: use such a file"
    ):
        convert_to_grouped_matrix(np.zeros((1, 292), np.uint8), block_type("Q8_K"), "x")


def test_gguf_codebook_block_type_names_the_required_package(monkeypatch: pytest.MonkeyPatch) -> None:
    codebook_blocks._codebook.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(BackendUnavailableError, match=r"GGUF blocks of type IQ2_XS need the package gguf: .*\[gguf\]"):
        convert_to_grouped_matrix(np.zeros((1, 74), np.uint8), block_type("IQ2_XS"), "x")


def same(one: GroupedMatrix, other: GroupedMatrix) -> bool:
    minimums = (one.minimums is None) == (other.minimums is None) and (one.minimums is None or np.array_equal(one.minimums, other.minimums))
    return bool(np.array_equal(one.codes, other.codes) and np.array_equal(one.scales, other.scales) and minimums)
