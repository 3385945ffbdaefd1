"""Convert GGUF's quantised blocks to `GroupedMatrix`, without any change of values.

In every block type a value is `scale * code` or `scale * code + minimum`, computed in float32, as in `GroupedMatrix`. Only the order of
codes in memory differs. Source of the layouts: ggml-common.h and ggml-quants.c of ggml.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.gguf import codebook_blocks as codebook
from paceline.models.gguf.codebook_blocks import Bytes, CodesScalesMinimums, Floats, read_float16_as_float32, view_bytes_as
from paceline.models.gguf.header import BlockType
from paceline.models.grouped import (
    DOUBLED_E2M1_VALUES,
    SUPER_BLOCK_COLUMNS,
    GroupedMatrix,
    SuperBlocks,
    convert_in_chunks,
    halved_e8m0_scales,
    pack_nibbles,
    super_blocks_nbytes,
)

_WEIGHTS_PER_CHUNK = 1 << 17  # few, to keep temporary arrays small

SuperBlockArrays = tuple[NDArray[Any], ...]
"""Arrays of `SuperBlocks` of n super-blocks: alternately float16 scales [n, 1] and integer factors [n, groups in a block]."""


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix in the quantised blocks of a GGUF file. A runtime can repack the blocks itself or call `to_grouped_matrix`.

    Attributes:
        raw: bytes of the file, [number of stored rows, bytes of a row].
        block_type: type of the quantised blocks.
        stored_name: path and tensor name, for errors.
        row_order: [N] for each row of the matrix the index of the stored row; None = the stored order.
        column_run_order: [K / 32] for each run of 32 columns of the matrix the index of the stored run; None = the stored order.
    """

    raw: Bytes
    block_type: BlockType
    stored_name: str
    row_order: NDArray[np.int64] | None = None
    column_run_order: NDArray[np.int64] | None = None  # a run is 32 adjacent columns

    @property
    def shape(self) -> tuple[int, int]:
        num_rows = len(self.raw if self.row_order is None else self.row_order)
        return num_rows, self.raw.shape[1] // self.block_type.num_bytes * self.block_type.num_items

    def select_rows(self, rows: NDArray[np.int32] | slice) -> "StoredBlocks":
        """Return a matrix with only the selected rows, without reading them."""
        if self.row_order is None and isinstance(rows, slice):
            return replace(self, raw=self.raw[rows])
        return replace(self, row_order=(np.arange(len(self.raw)) if self.row_order is None else self.row_order)[rows])

    def to_grouped_matrix(self, *, num_threads: int = 1) -> GroupedMatrix:
        """Return the matrix as a `GroupedMatrix`.

        Raises:
            CheckpointError: A scale is not finite.
        """
        matrix = convert_to_grouped_matrix(self.raw, self.block_type, self.stored_name, self.row_order, num_threads=num_threads)
        return matrix if self.column_run_order is None else matrix.reorder_runs(self.column_run_order)


@dataclass(frozen=True, slots=True)
class _BlockLayout:
    """How to convert blocks of one GGUF type.

    Attributes:
        read_blocks: returns codes, scales and minimums of n blocks [n, bytes of a block].
        bits, group_size, zero_point, table: as in the resulting `GroupedMatrix`.
        code_bits: number of bits of a stored code; only for types with super-blocks, such as K-quants.
        read_super_blocks: returns the arrays of `SuperBlocks` of n blocks; None for types without super-blocks.
    """

    read_blocks: Callable[[Bytes], CodesScalesMinimums]
    bits: int
    group_size: int
    zero_point: int = 0
    table: NDArray[np.int8] | None = None
    code_bits: int = 0
    read_super_blocks: Callable[[Bytes], SuperBlockArrays] | None = None


def convert_to_grouped_matrix(
    raw: Bytes, block_type: BlockType, stored_name: str, row_order: NDArray[np.int64] | None = None, *, num_threads: int = 1
) -> GroupedMatrix:
    """Return the matrix in the blocks `raw` [number of stored rows, bytes of a row], as a `GroupedMatrix`.

    Args:
        stored_name: path and tensor name, for errors.
        row_order: indices of the stored rows to convert; None = all rows in order.

    Raises:
        CheckpointError: The type is not in `QUANTIZED_BLOCK_TYPES`, or a scale is not finite.
    """
    layout = _block_layout(block_type, stored_name)
    num_rows, columns = len(raw if row_order is None else row_order), raw.shape[1] // block_type.num_bytes * block_type.num_items
    matrix = _allocate_matrix(layout, block_type, num_rows, columns)
    arrays = (*matrix.arrays, *(() if matrix.super_blocks is None else matrix.super_blocks.arrays))

    def convert_row_range(row_range: slice) -> None:
        row_bytes = raw[row_range] if row_order is None else raw[row_order[row_range]]
        blocks = row_bytes.reshape(-1, block_type.num_bytes)
        with np.errstate(invalid="ignore", over="ignore"):  # scales are checked below
            parts: tuple[NDArray[Any] | None, ...] = layout.read_blocks(blocks)
        if not all(np.isfinite(part).all() for part in parts[1:] if part is not None):
            raise not_finite_error(stored_name, row_range.start, row_range.stop - 1)
        parts = (*parts, *(() if layout.read_super_blocks is None else layout.read_super_blocks(blocks)))
        for stored, part in zip(arrays, (part for part in parts if part is not None), strict=True):
            stored[row_range] = part.reshape(len(row_bytes), -1)

    convert_in_chunks(convert_row_range, num_rows, max(1, _WEIGHTS_PER_CHUNK // columns), num_threads)
    return matrix


def not_finite_error(stored_name: str, first: int, last: int) -> CheckpointError:
    """Return the error for a scale in rows `first` to `last` that is not finite."""
    return CheckpointError(f"{stored_name} has a scale that is not finite in rows {first} to {last}; download the file again")


def _allocate_matrix(layout: _BlockLayout, block_type: BlockType, num_rows: int, columns: int) -> GroupedMatrix:
    def allocate_for_all_blocks(array_of_one_block: NDArray[Any]) -> NDArray[Any]:
        return np.empty((num_rows, columns // block_type.num_items * array_of_one_block.size), array_of_one_block.dtype)

    zeros = np.zeros((1, block_type.num_bytes), np.uint8)
    codes, scales, *minimums = (allocate_for_all_blocks(part) for part in layout.read_blocks(zeros) if part is not None)
    blocks = None
    if layout.read_super_blocks is not None:
        blocks = SuperBlocks(layout.code_bits, *map(allocate_for_all_blocks, layout.read_super_blocks(zeros)))
    return GroupedMatrix(codes, scales, minimums[0] if minimums else None, layout.bits, layout.zero_point, layout.table, blocks)


def grouped_matrix_size(
    shape: tuple[int, ...], block_type: BlockType, stored_name: str, columns_per_scale: int | None = SUPER_BLOCK_COLUMNS
) -> tuple[int, int]:
    """Return the number of bits of a code, and of bytes in memory, that a matrix has after its conversion to a `GroupedMatrix`.

    Args:
        columns_per_scale: number of columns that share a float16 scale; None = each group has a float32 scale.
    """
    layout = _block_layout(block_type, stored_name)
    has_minimums = layout.read_blocks(np.zeros((1, block_type.num_bytes), np.uint8))[2] is not None
    num_items = shape[0] * shape[1]
    if layout.read_super_blocks is not None and columns_per_scale is not None:
        return layout.bits, super_blocks_nbytes(num_items, layout.code_bits, columns_per_scale, has_minimums=has_minimums)
    return layout.bits, num_items * layout.bits // 8 + num_items // layout.group_size * (8 if has_minimums else 4)


def _block_layout(block_type: BlockType, stored_name: str) -> _BlockLayout:
    layout = _BLOCK_LAYOUTS.get(block_type.name)
    if layout is None:
        raise CheckpointError(
            f"{stored_name} is of type {block_type.name}; supported are F32, F16, BF16, {', '.join(_BLOCK_LAYOUTS)}: use such a file"
        )
    return layout


def _shift_right(values: Bytes, shifts: tuple[int, ...]) -> Bytes:
    """Return values [n, p, 1, w] shifted right by each of `shifts`, as [n, p, len(shifts), w]."""
    return values >> np.array(shifts, np.uint8)[:, None]


def _unpack_nibbles(values: Bytes) -> Bytes:
    """Return [n, 32] codes from [n, 16] bytes: the low four bits of all bytes, then the high four bits."""
    return np.concatenate([values & np.uint8(15), values >> np.uint8(4)], axis=1)


def _to_signed(codes: Bytes, zero_point: int) -> NDArray[np.int8]:
    return codes.view(np.int8) - np.int8(zero_point)


def _read_q4_0(blocks: Bytes) -> CodesScalesMinimums:
    return blocks[:, 2:], read_float16_as_float32(blocks, 0), None  # not unpacked: `GroupedMatrix` has the same order of codes


def _read_q4_1(blocks: Bytes) -> CodesScalesMinimums:
    return blocks[:, 4:], read_float16_as_float32(blocks, 0), read_float16_as_float32(blocks, 2)


def _unpack_5_bit_codes(high: Bytes, low: Bytes) -> Bytes:
    """Return [n, 32] codes from their low four bits [n, 16] and their fifth bits [n, 4]."""
    return _unpack_nibbles(low) | np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)


def _read_q5_0(blocks: Bytes) -> CodesScalesMinimums:
    return _to_signed(_unpack_5_bit_codes(blocks[:, 2:6], blocks[:, 6:]), 16), read_float16_as_float32(blocks, 0), None


def _read_q5_1(blocks: Bytes) -> CodesScalesMinimums:
    return (
        _unpack_5_bit_codes(blocks[:, 4:8], blocks[:, 8:]).view(np.int8),
        read_float16_as_float32(blocks, 0),
        read_float16_as_float32(blocks, 2),
    )


def _read_q8_0(blocks: Bytes) -> CodesScalesMinimums:
    return blocks[:, 2:].view(np.int8), read_float16_as_float32(blocks, 0), None


def _unpack_2_bit_codes(values: Bytes) -> Bytes:
    """Return [n, 256] codes from [n, 64] bytes. Of each 32 bytes, the lowest bit pairs are the first 32 codes, and so on."""
    return (_shift_right(values.reshape(-1, 2, 1, 32), (0, 2, 4, 6)) & np.uint8(3)).reshape(-1, 256)


def _read_q2_k(blocks: Bytes) -> CodesScalesMinimums:
    return pack_nibbles(_unpack_2_bit_codes(blocks[:, 16:80])), *_float32_scales_and_minimums(_read_q2_k_super_blocks(blocks))


def _read_q2_k_super_blocks(blocks: Bytes) -> SuperBlockArrays:
    return (
        view_bytes_as(blocks, 80, 82, "<f2"),
        blocks[:, :16] & np.uint8(15),
        view_bytes_as(blocks, 82, 84, "<f2"),
        blocks[:, :16] >> np.uint8(4),
    )


def _read_q3_k(blocks: Bytes) -> CodesScalesMinimums:
    third_bits = _shift_right(blocks[:, None, None, :32], tuple(range(8))).reshape(-1, 256) & np.uint8(1)
    return (
        pack_nibbles(_unpack_2_bit_codes(blocks[:, 32:96]) | third_bits << np.uint8(2)),
        _float32_scales(_read_q3_k_super_blocks(blocks)),
        None,
    )


def _read_q3_k_super_blocks(blocks: Bytes) -> SuperBlockArrays:
    factors = blocks[:, 96:108]
    high = _shift_right(factors[:, None, None, 8:], (0, 2, 4, 6)).reshape(-1, 16) & np.uint8(3)
    return view_bytes_as(blocks, 108, 110, "<f2"), _to_signed(_unpack_nibbles(factors[:, :8]) | high << np.uint8(4), 32)


def _read_q4_k_q5_k_super_blocks(blocks: Bytes) -> SuperBlockArrays:
    """Return the float16 scales and minimums of Q4_K and Q5_K blocks, each before its eight 6-bit factors, stored in bytes 4 to 15."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    high_bits = np.uint8(6)
    factors = np.concatenate([first & np.uint8(63), third & np.uint8(15) | first >> high_bits << np.uint8(4)], axis=1)
    offsets = np.concatenate([second & np.uint8(63), third >> np.uint8(4) | second >> high_bits << np.uint8(4)], axis=1)
    return view_bytes_as(blocks, 0, 2, "<f2"), factors, view_bytes_as(blocks, 2, 4, "<f2"), offsets


def _float32_scales_and_minimums(factors: SuperBlockArrays) -> tuple[Floats, Floats]:
    return _float32_scales(factors[:2]), -_float32_scales(factors[2:])


def _float32_scales(factors: SuperBlockArrays) -> Floats:
    block_scales, group_factors = (part.astype(np.float32) for part in factors)
    products: Floats = block_scales * group_factors
    return products


def _read_q4_k(blocks: Bytes) -> CodesScalesMinimums:
    # In Q4_K 32 bytes hold two runs of 32 codes, in the low and the high nibbles. In `GroupedMatrix` each run has 16 bytes of its own.
    first_16, last_16 = np.moveaxis(blocks[:, 16:].reshape(-1, 4, 2, 16), 2, 0)
    packed = np.stack([first_16 & np.uint8(15) | last_16 << np.uint8(4), first_16 >> np.uint8(4) | last_16 & np.uint8(240)], axis=2)
    return packed.reshape(-1, 128), *_float32_scales_and_minimums(_read_q4_k_q5_k_super_blocks(blocks))


def _read_q5_k(blocks: Bytes) -> CodesScalesMinimums:
    low = (_shift_right(blocks[:, 48:].reshape(-1, 4, 1, 32), (0, 4)) & np.uint8(15)).reshape(-1, 256)
    fifth_bits = _shift_right(blocks[:, None, None, 16:48], tuple(range(8))).reshape(-1, 256) & np.uint8(1)
    return (low | fifth_bits << np.uint8(4)).view(np.int8), *_float32_scales_and_minimums(_read_q4_k_q5_k_super_blocks(blocks))


def _read_q6_k(blocks: Bytes) -> CodesScalesMinimums:
    low = (_shift_right(blocks[:, :128].reshape(-1, 2, 1, 64), (0, 4)) & np.uint8(15)).reshape(-1, 256)
    codes = low | _unpack_2_bit_codes(blocks[:, 128:192]) << np.uint8(4)
    return _to_signed(codes, 32), _float32_scales(_read_q6_k_super_blocks(blocks)), None


def _read_q6_k_super_blocks(blocks: Bytes) -> SuperBlockArrays:
    return view_bytes_as(blocks, 208, 210, "<f2"), blocks[:, 192:208].view(np.int8)


_IQ4_CODE_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _read_iq4_xs(blocks: Bytes) -> CodesScalesMinimums:
    return blocks[:, 8:], _float32_scales(_read_iq4_xs_super_blocks(blocks)), None


def _read_iq4_xs_super_blocks(blocks: Bytes) -> SuperBlockArrays:
    low = _shift_right(blocks[:, 4:8].reshape(-1, 4, 1, 1), (0, 4)).reshape(-1, 8) & np.uint8(15)
    high = _shift_right(blocks[:, 2:4].reshape(-1, 2, 1, 1), (0, 2, 4, 6)).reshape(-1, 8) & np.uint8(3)
    return view_bytes_as(blocks, 0, 2, "<f2"), _to_signed(low | high << np.uint8(4), 32)


def _read_mxfp4(blocks: Bytes) -> CodesScalesMinimums:
    return blocks[:, 1:], halved_e8m0_scales(blocks[:, :1]), None


_BLOCK_LAYOUTS: Mapping[str, _BlockLayout] = {
    "Q4_0": _BlockLayout(_read_q4_0, 4, 32, 8),
    "Q4_1": _BlockLayout(_read_q4_1, 4, 32),
    "Q5_0": _BlockLayout(_read_q5_0, 8, 32),
    "Q5_1": _BlockLayout(_read_q5_1, 8, 32),
    "Q8_0": _BlockLayout(_read_q8_0, 8, 32),
    "Q2_K": _BlockLayout(_read_q2_k, 4, 16, code_bits=2, read_super_blocks=_read_q2_k_super_blocks),
    "Q3_K": _BlockLayout(_read_q3_k, 4, 16, 4, code_bits=3, read_super_blocks=_read_q3_k_super_blocks),
    "Q4_K": _BlockLayout(_read_q4_k, 4, 32, code_bits=4, read_super_blocks=_read_q4_k_q5_k_super_blocks),
    "Q5_K": _BlockLayout(_read_q5_k, 8, 32, code_bits=5, read_super_blocks=_read_q4_k_q5_k_super_blocks),
    "Q6_K": _BlockLayout(_read_q6_k, 8, 16, code_bits=6, read_super_blocks=_read_q6_k_super_blocks),
    "IQ4_NL": _BlockLayout(_read_q4_0, 4, 32, table=_IQ4_CODE_VALUES),
    "IQ4_XS": _BlockLayout(_read_iq4_xs, 4, 32, table=_IQ4_CODE_VALUES, code_bits=4, read_super_blocks=_read_iq4_xs_super_blocks),
    "MXFP4": _BlockLayout(_read_mxfp4, 4, 32, table=DOUBLED_E2M1_VALUES),
    "NVFP4": _BlockLayout(codebook.read_nvfp4, 4, 16, table=DOUBLED_E2M1_VALUES),
    "IQ2_XXS": _BlockLayout(codebook.read_iq2_xxs, 4, 32, table=codebook.IQ2_CODE_VALUES),
    "IQ2_XS": _BlockLayout(codebook.read_iq2_xs, 4, 16, table=codebook.IQ2_CODE_VALUES),
    "IQ2_S": _BlockLayout(codebook.read_iq2_s, 4, 16, table=codebook.IQ2_CODE_VALUES),
    "IQ3_XXS": _BlockLayout(codebook.read_iq3_xxs, 4, 32, table=codebook.IQ3_XXS_CODE_VALUES),
    "IQ3_S": _BlockLayout(codebook.read_iq3_s, 4, 32, table=codebook.IQ3_S_CODE_VALUES),
    "IQ1_S": _BlockLayout(codebook.read_iq1_s, 4, 32, table=codebook.IQ1_CODE_VALUES),
    "IQ1_M": _BlockLayout(codebook.read_iq1_m, 4, 16, table=codebook.IQ1_CODE_VALUES),
    "TQ1_0": _BlockLayout(codebook.read_tq1_0, 4, 32, 1),
    "TQ2_0": _BlockLayout(codebook.read_tq2_0, 4, 32, 1),
    "Q1_0": _BlockLayout(codebook.read_q1_0, 4, 32, table=codebook.Q1_0_CODE_VALUES),
}
QUANTIZED_BLOCK_TYPES = tuple(_BLOCK_LAYOUTS)
"""Names of the supported quantised block types."""
TYPES_WITHOUT_NATIVE_KERNEL = frozenset(
    name for name, layout in _BLOCK_LAYOUTS.items() if layout.read_blocks.__module__ == codebook.__name__
)
"""Names of the block types that the native runtime converts to a `GroupedMatrix`, because no native kernel reads their blocks."""
