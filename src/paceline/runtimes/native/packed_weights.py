"""Quantised weights in the layout of kernels/panels.h: panels of 16 interleaved outputs (rows of W) with their scales and codes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CapacityError, CheckpointError
from paceline.models.gguf.blocks import TYPES_WITHOUT_NATIVE_KERNEL, StoredBlocks, not_finite_error
from paceline.models.gguf.header import BLOCK_TYPES
from paceline.models.grouped import RUN_COLUMNS, GroupedMatrix, SuperBlocks
from paceline.models.storage.mapped_files import drop_pages
from paceline.runtimes.native.aligned import Arena, address_of, aligned_empty
from paceline.runtimes.native.library import kernels
from paceline.runtimes.native.records import GgufBlocksRecord, Matrix, MatrixKind, SuperBlocksRecord

PANEL_OUTPUTS = 16
MAX_GROUP_SIZE = 256
"""Maximum number of columns of a group that the kernels support."""
_KINDS_FLOAT32_SCALES = {
    (8, False): MatrixKind.PANELS_8_BITS, (8, True): MatrixKind.PANELS_8_BITS_MINIMUM,
    (4, False): MatrixKind.PANELS_4_BITS, (4, True): MatrixKind.PANELS_4_BITS_MINIMUM,
}  # fmt: skip
"""Kinds with float32 scales, by bits of a code and whether groups have minimums."""
_KINDS_FLOAT16_SCALES = {
    MatrixKind.PANELS_4_BITS: MatrixKind.PANELS_4_BITS_FLOAT16,
    MatrixKind.PANELS_4_BITS_TABLE: MatrixKind.PANELS_4_BITS_TABLE_FLOAT16,
}
"""Kinds with float16 scales, by the kind with float32 scales."""
_KINDS_SUPER_BLOCKS = {
    (2, True): MatrixKind.PANELS_Q2_K, (3, False): MatrixKind.PANELS_Q3_K, (4, True): MatrixKind.PANELS_Q4_K,
    (5, True): MatrixKind.PANELS_Q5_K, (6, False): MatrixKind.PANELS_Q6_K, (4, False): MatrixKind.PANELS_IQ4_XS,
}  # fmt: skip
"""Kinds of K-quants and IQ4_XS, by bits of a code and whether groups have minimums."""
_UNSIGNED_ZERO_POINTS = {6: 32}  # by bits of a code: zero point of signed codes after their conversion to unsigned
NARROW_KINDS = frozenset(
    (
        MatrixKind.PANELS_4_BITS, MatrixKind.PANELS_4_BITS_MINIMUM, MatrixKind.PANELS_4_BITS_FLOAT16,
        *(kind for kind in _KINDS_SUPER_BLOCKS.values() if kind is not MatrixKind.PANELS_IQ4_XS),
    )
)  # fmt: skip
"""Kinds with codes of at most 6 bits. On some processors, rows are packed differently for them (NARROW_WORDS in kernels/byte_dot.h)."""
TABLE_KINDS = frozenset((MatrixKind.PANELS_4_BITS_TABLE, MatrixKind.PANELS_4_BITS_TABLE_FLOAT16, MatrixKind.PANELS_IQ4_XS))
"""Kinds whose codes are indices into a table. On some processors, rows are packed differently for them (TABLE_WORDS)."""
_FLOAT16_SCALE_TYPES = ("NVFP4", "TQ1_0", "TQ2_0", "Q1_0")  # block types with several groups whose scales are exact in float16
_PANELS_PER_CALL = 16  # number of panels that one call of the kernels fills
_GGUF_TYPE_NUMBERS = {block_type.name: number for number, block_type in BLOCK_TYPES.items()}
_DROP_PAGES_MIN_BYTES = 1 << 25  # while a larger memory-mapped matrix is packed, its pages are released
_MXFP4_FLOAT16_EXPONENTS = (104, 143)  # lowest and highest scale byte e of MXFP4 whose scale 2^(e - 128) is exact in float16


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A quantised matrix in panels.

    Attributes:
        data: [panels, bytes of a panel] uint8.
        outputs, columns: rows and columns of the matrix.
        group_size: columns that share a scale.
        zero_point: subtracted from the codes, which are unsigned.
        table: [16] int8, each code is an index into it (see `GroupedMatrix`), and no value is less than -zero_point; None = no table.
        scale_columns: in K-quants, how many columns share a float16 scale; in other kinds 0.
    """

    kind: MatrixKind
    data: NDArray[np.uint8]
    outputs: int
    columns: int
    group_size: int
    zero_point: int
    table: NDArray[np.int8] | None = None
    scale_columns: int = 0
    _record: Matrix = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_record", self.matrix_record(0, None))

    def matrix_record(self, out: int, bias: int | None) -> Matrix:
        """Return the record for the kernels. out: number of the value that receives the products; bias: address, None = no bias."""
        address, row_bytes = self.data.ctypes.data, self.data.shape[1]
        table = None if self.table is None else self.table.ctypes.data
        sizes = self.outputs, self.columns, self.group_size, self.zero_point
        return Matrix(self.kind, *sizes, out, self.scale_columns, row_bytes, address, None, None, bias, table)

    def first_outputs(self, count: int) -> "PackedWeights":
        """Return a view of the first `count` outputs (rows)."""
        return replace(self, data=self.data[: -(-count // PANEL_OUTPUTS)], outputs=count)

    def rows(self, indices: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the exact values of some rows of the matrix, [len(indices), columns], as `GroupedMatrix.values` computes them."""
        if self.scale_columns:
            row_indices, values = np.array(indices, np.int32), np.empty((len(indices), self.columns), np.float32)
            kernels().paceline_super_block_rows(self._record, address_of(row_indices), len(row_indices), address_of(values))
            return values
        bits, has_minimums = next((key for key, kind in _KINDS_FLOAT32_SCALES.items() if kind == self.kind), (4, False))
        has_float16, groups = self.kind in _KINDS_FLOAT16_SCALES.values(), self.columns // self.group_size
        words = self.data.view(np.uint32).reshape(len(self.data), groups // 2 if has_float16 else groups, -1, PANEL_OUTPUTS)
        words_of_rows = np.ascontiguousarray(words[indices // PANEL_OUTPUTS, :, :, indices % PANEL_OUTPUTS])  # [rows, groups, words]
        scales, codes = words_of_rows[:, :, :1].view(np.float32), words_of_rows[:, :, 1 + has_minimums :].copy().view(np.uint8)
        if has_float16:
            scale_pairs = self.data.view(np.float16).reshape(len(self.data), groups // 2, -1, 2, PANEL_OUTPUTS)[:, :, 0]
            scales_of_rows = scale_pairs[indices // PANEL_OUTPUTS, :, :, indices % PANEL_OUTPUTS]
            scales = scales_of_rows.reshape(len(indices), groups, 1).astype(np.float32)
            codes = codes.reshape(len(indices), groups, -1)
        if bits == 4:  # low nibbles are four columns, high nibbles the next four
            quads = codes.reshape(*codes.shape[:2], -1, 1, 4)
            codes = np.concatenate([quads & np.uint8(15), quads >> np.uint8(4)], axis=3).reshape(*codes.shape[:2], self.group_size)
        shifted = codes.astype(np.int32) - np.int32(self.zero_point) if self.table is None else self.table[codes]
        values = shifted.astype(np.float32) * scales
        if has_minimums:
            values += words_of_rows[:, :, 1:2].view(np.float32)
        return values.reshape(len(indices), self.columns)


def pack_weights(matrix: GroupedMatrix, num_threads: int, arena: Arena | None = None) -> PackedWeights:
    """Pack a matrix into panels. A group may have at most MAX_GROUP_SIZE columns."""
    has_float16 = matrix.super_blocks is None and matrix.bits == 4 and matrix.minimums is None and _scales_fit_float16(matrix.scales)
    packed = _allocate(matrix, matrix.shape[0], has_float16=has_float16, arena=arena)
    if matrix.super_blocks is not None:
        _fill_super_blocks(packed, matrix, matrix.super_blocks, num_threads)
    else:
        _fill_groups(packed, matrix, num_threads)
    return packed


def _fill_groups(packed: PackedWeights, matrix: GroupedMatrix, num_threads: int) -> None:
    codes, scales, minimums = (_contiguous(array) for array in (matrix.codes, matrix.scales, matrix.minimums))
    address = [None if array is None else array.ctypes.data for array in (codes, scales, minimums)]
    stored = Matrix(packed.kind, *matrix.shape, matrix.group_size, 0, 0, 0, codes.strides[0], *address, None, None)
    library, to = kernels(), packed.data.ctypes.data
    _fill_panels(
        packed, lambda begin, end: library.paceline_fill_panels(stored, packed.kind, _sign_bit_mask(matrix), begin, end, to), num_threads
    )


def _pack_as_groups(blocks: StoredBlocks, packed: PackedWeights, num_threads: int) -> PackedWeights:
    """Fill the panels of a matrix whose GGUF type the kernels cannot read.

    Each call converts some rows, without loss, to integer codes with a scale for each group of columns.
    """

    def fill_range(begin: int, end: int) -> None:
        rows = slice(begin * PANEL_OUTPUTS, min(end * PANEL_OUTPUTS, packed.outputs))
        try:
            matrix = blocks.select_rows(rows).to_grouped_matrix()
        except CheckpointError:
            raise not_finite_error(blocks.stored_name, rows.start, rows.stop - 1) from None
        _fill_groups(replace(packed, data=packed.data[begin:end], outputs=len(matrix.codes)), matrix, 1)

    _fill_panels(packed, fill_range, num_threads)
    return packed


def pack_gguf_blocks(blocks: StoredBlocks, num_threads: int, arena: Arena | None = None) -> PackedWeights:
    """Pack a matrix that is stored in GGUF blocks into panels. The kernels read most block types directly.

    Raises:
        CheckpointError: a scale is not finite.
        CapacityError: the panels do not fit in memory.
    """
    (outputs, columns), zero_row = blocks.shape, _groups_of_zero_row(blocks)
    packed = _allocate(zero_row, outputs, has_float16=_block_scales_fit_float16(blocks, zero_row), arena=arena)
    if blocks.block_type.name in TYPES_WITHOUT_NATIVE_KERNEL:
        return _pack_as_groups(blocks, packed, num_threads)
    raw = blocks.raw if blocks.raw.strides[1] == 1 else np.ascontiguousarray(blocks.raw)
    row_order = None if blocks.row_order is None else np.ascontiguousarray(blocks.row_order, np.int64)
    run_positions = None if blocks.column_run_order is None else np.argsort(blocks.column_run_order).astype(np.int32)
    address = [None if array is None else array.ctypes.data for array in (raw, row_order, run_positions)]
    sizes = outputs, columns, packed.zero_point, packed.scale_columns, _sign_bit_mask(zero_row), raw.strides[0]
    record = GgufBlocksRecord(_GGUF_TYPE_NUMBERS[blocks.block_type.name], packed.kind, *sizes, *address)
    library, to = kernels(), packed.data

    def fill_range(begin: int, end: int) -> None:
        result = library.paceline_pack_gguf_blocks(record, begin, end, to.shape[1], to.ctypes.data)
        if result >= 0:
            raise not_finite_error(blocks.stored_name, result, result)
        if result == -2:
            raise CapacityError(f"{blocks.stored_name} cannot be packed: out of memory; use a smaller model, or close other programs")
        assert result == -1  # block types that the kernels do not read are handled above
        if row_order is None and raw.nbytes > _DROP_PAGES_MIN_BYTES:
            drop_pages([raw[begin * PANEL_OUTPUTS : end * PANEL_OUTPUTS]])

    _fill_panels(packed, fill_range, num_threads)
    return packed


def packed_bytes(blocks: StoredBlocks) -> int:
    """Return an upper bound on the bytes of the panels that `pack_gguf_blocks` would return, without reading all weights."""
    zero_row = _groups_of_zero_row(blocks)
    has_float16 = blocks.block_type.name != "MXFP4" and _block_scales_fit_float16(blocks, zero_row)  # of MXFP4, float32 is assumed
    panel = _allocate(zero_row, PANEL_OUTPUTS, has_float16=has_float16)
    return -(-blocks.shape[0] // PANEL_OUTPUTS) * panel.data.nbytes


def _allocate(matrix: GroupedMatrix, outputs: int, *, has_float16: bool, arena: Arena | None = None) -> PackedWeights:
    """Allocate panels for `outputs` outputs with the same columns and groups as `matrix`.

    Args:
        has_float16: store float16 scales.
        arena: where to allocate; None = a separate array.
    """
    _, columns = matrix.shape
    if matrix.super_blocks is not None:
        code_bits, scale_columns = matrix.super_blocks.code_bits, columns // matrix.super_blocks.scales.shape[1]
        kind = _KINDS_SUPER_BLOCKS[code_bits, matrix.minimums is not None]
        panel_bytes = kernels().paceline_super_block_bytes(columns, scale_columns, kind)
        zero_point = _UNSIGNED_ZERO_POINTS.get(code_bits, matrix.zero_point)
    else:
        kind = (
            _KINDS_FLOAT32_SCALES[matrix.bits, matrix.minimums is not None]
            if matrix.code_values is None
            else MatrixKind.PANELS_4_BITS_TABLE
        )
        kind, scale_columns = _KINDS_FLOAT16_SCALES[kind] if kind in _KINDS_FLOAT16_SCALES and has_float16 else kind, 0
        panel_bytes = kernels().paceline_panel_bytes(columns, matrix.group_size, kind)
        zero_point = matrix.zero_point + _sign_bit_mask(matrix)
    zero_point = zero_point if matrix.code_values is None else -int(matrix.code_values.min())
    data = (aligned_empty if arena is None else arena.allocate)((-(-outputs // PANEL_OUTPUTS), panel_bytes), np.uint8)
    return PackedWeights(kind, data, outputs, columns, matrix.group_size, zero_point, matrix.code_values, scale_columns)


def _sign_bit_mask(matrix: GroupedMatrix) -> int:
    """Return the mask with which codes are XORed to make them unsigned: 128 for signed bytes, else 0."""
    return 128 if matrix.bits == 8 and matrix.codes.dtype == np.int8 else 0


def _fill_super_blocks(packed: PackedWeights, matrix: GroupedMatrix, blocks: SuperBlocks, num_threads: int) -> None:
    arrays = [_contiguous(array) for array in (matrix.codes, blocks.scales, blocks.minimums, blocks.factors, blocks.minimum_factors)]
    address = [None if array is None else array.ctypes.data for array in arrays]
    sizes = packed.kind, packed.outputs, packed.columns, packed.scale_columns, packed.zero_point
    stored, library, to = SuperBlocksRecord(*sizes, arrays[0].strides[0], *address), kernels(), packed.data.ctypes.data
    _fill_panels(packed, lambda begin, end: library.paceline_fill_super_blocks(stored, begin, end, to), num_threads)


def _fill_panels(packed: PackedWeights, fill_range: Callable[[int, int], object], num_threads: int) -> None:
    """Call `fill_range(begin, end)` for ranges of panels until all are filled."""
    data = packed.data

    def fill_panels_from(begin: int) -> None:
        fill_range(begin, min(begin + _PANELS_PER_CALL, len(data)))

    if num_threads == 1:
        for begin in range(0, len(data), _PANELS_PER_CALL):
            fill_panels_from(begin)
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(fill_panels_from, range(0, len(data), _PANELS_PER_CALL)))


def _scales_fit_float16(scales: NDArray[np.float32]) -> bool:
    """Return whether float16 represents the scales exactly, and rows have an even number of scales: the kernels load them in pairs."""
    if scales.shape[1] % 2:
        return False
    with np.errstate(over="ignore"):
        return bool(np.array_equal(scales.astype(np.float16), scales))


def _contiguous(array: Any) -> Any:
    return None if array is None else np.ascontiguousarray(array)


def _groups_of_zero_row(blocks: StoredBlocks) -> GroupedMatrix:
    """Return a matrix of one row of zeros, whose groups have the shapes and types of those in `blocks`."""
    zeros = np.zeros((1, blocks.raw.shape[1]), np.uint8)
    return StoredBlocks(zeros, blocks.block_type, blocks.stored_name, column_run_order=blocks.column_run_order).to_grouped_matrix()


def _block_scales_fit_float16(blocks: StoredBlocks, zero_row: GroupedMatrix) -> bool:
    """Return whether the scales of GGUF blocks can be stored as float16 (see `_scales_fit_float16`), without converting the blocks."""
    if blocks.block_type.name in _FLOAT16_SCALE_TYPES:
        return True
    if blocks.shape[1] // RUN_COLUMNS % 2 or zero_row.group_size != RUN_COLUMNS:
        return False
    if blocks.block_type.name == "MXFP4":
        exponents = (blocks.raw if blocks.row_order is None else blocks.raw[blocks.row_order])[:, :: blocks.block_type.num_bytes]
        return bool(_MXFP4_FLOAT16_EXPONENTS[0] <= exponents.min() and exponents.max() <= _MXFP4_FLOAT16_EXPONENTS[1])
    return blocks.block_type.num_items == RUN_COLUMNS
