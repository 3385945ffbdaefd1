"""Quantised weights in the kernels' panel layout (kernels/panels.h): 16 outputs interleaved, scales and codes in one stream."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CapacityError, CheckpointError
from paceline.models.gguf.blocks import CONVERTED_TYPES, StoredBlocks, not_finite_error
from paceline.models.gguf.header import BLOCK_TYPES
from paceline.models.grouped import RUN, GroupedMatrix, SuperBlocks
from paceline.models.storage.mapped_files import drop_pages
from paceline.runtimes.native.aligned import Arena, address_of, empty
from paceline.runtimes.native.library import kernels
from paceline.runtimes.native.records import BlocksRecord, Matrix, MatrixKind, SuperBlocksRecord

PANEL_OUTPUTS = 16
MAX_GROUP_SIZE = 256
_KINDS_FLOAT32_SCALES = {
    (8, False): MatrixKind.PANELS_8_BITS, (8, True): MatrixKind.PANELS_8_BITS_MINIMUM,
    (4, False): MatrixKind.PANELS_4_BITS, (4, True): MatrixKind.PANELS_4_BITS_MINIMUM,
}  # fmt: skip
"""By bits and whether there are minimums."""
_KINDS_FLOAT16_SCALES = {
    MatrixKind.PANELS_4_BITS: MatrixKind.PANELS_4_BITS_FLOAT16,
    MatrixKind.PANELS_4_BITS_TABLE: MatrixKind.PANELS_4_BITS_TABLE_FLOAT16,
}
_KINDS_SUPER_BLOCKS = {
    (2, True): MatrixKind.PANELS_Q2_K, (3, False): MatrixKind.PANELS_Q3_K, (4, True): MatrixKind.PANELS_Q4_K,
    (5, True): MatrixKind.PANELS_Q5_K, (6, False): MatrixKind.PANELS_Q6_K, (4, False): MatrixKind.PANELS_IQ4_XS,
}  # fmt: skip
_UNSIGNED_ZERO_POINTS = {6: 32}  # zero point of unsigned codes by bits, where it differs from that of signed codes
NARROW_KINDS = frozenset(
    (
        MatrixKind.PANELS_4_BITS, MatrixKind.PANELS_4_BITS_MINIMUM, MatrixKind.PANELS_4_BITS_FLOAT16,
        *(kind for kind in _KINDS_SUPER_BLOCKS.values() if kind is not MatrixKind.PANELS_IQ4_XS),
    )
)  # fmt: skip
"""Kinds with codes of at most 6 bits. Without a byte dot product, their rows are packed differently (kernels/byte_dot.h)."""
TABLE_KINDS = frozenset((MatrixKind.PANELS_4_BITS_TABLE, MatrixKind.PANELS_4_BITS_TABLE_FLOAT16, MatrixKind.PANELS_IQ4_XS))
"""Kinds whose codes index a table of values; their rows have a third packing."""
_FLOAT16_TYPES = ("NVFP4", "TQ1_0", "TQ2_0", "Q1_0")  # blocks of several groups, whose scales float16 holds exactly
_PANELS_PER_CALL = 16
_GGUF_NUMBERS = {block_type.name: number for number, block_type in BLOCK_TYPES.items()}
_LARGE_BYTES = 1 << 25  # pages of larger matrices are dropped from memory while they are packed, not afterwards
_FLOAT16_EXPONENTS = (104, 143)  # MXFP4 exponents e for which float16 can store the scale 2^(e - 128)


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A matrix in panels.

    Attributes:
        data: [panels, bytes of a panel] uint8.
        outputs, columns, group_size: of the matrix.
        zero_point: subtracted from the unsigned codes.
        table: [16] values of the codes, see `GroupedMatrix`; plus the zero point they are unsigned.
        super_block_columns: columns of a K-quant that share float16 scales; else 0.
    """

    kind: MatrixKind
    data: NDArray[np.uint8]
    outputs: int
    columns: int
    group_size: int
    zero_point: int
    table: NDArray[np.int8] | None = None
    super_block_columns: int = 0
    _record: Matrix = field(init=False, repr=False, compare=False)  # for reading rows

    def __post_init__(self) -> None:
        object.__setattr__(self, "_record", self.matrix(0, None))

    def matrix(self, out: int, bias: int | None) -> Matrix:
        """Return the kernels' record: products go to buffer `out`; `bias` is an address."""
        address, row_bytes = self.data.ctypes.data, self.data.shape[1]
        table = None if self.table is None else self.table.ctypes.data
        sizes = self.outputs, self.columns, self.group_size, self.zero_point
        return Matrix(self.kind, *sizes, out, self.super_block_columns, row_bytes, address, None, None, bias, table)

    def first_outputs(self, count: int) -> "PackedWeights":
        """Return a view of the first `count` outputs."""
        return replace(self, data=self.data[: -(-count // PANEL_OUTPUTS)], outputs=count)

    def rows(self, numbers: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the exact values of some rows, [len(numbers), columns], as `GroupedMatrix.values` computes them."""
        if self.super_block_columns:
            chosen, found = np.array(numbers, np.int32), np.empty((len(numbers), self.columns), np.float32)
            kernels().paceline_super_block_rows(self._record, address_of(chosen), len(chosen), address_of(found))
            return found
        bits, has_minimums = next((key for key, kind in _KINDS_FLOAT32_SCALES.items() if kind == self.kind), (4, False))
        has_float16, groups = self.kind in _KINDS_FLOAT16_SCALES.values(), self.columns // self.group_size
        words = self.data.view(np.uint32).reshape(len(self.data), groups // 2 if has_float16 else groups, -1, PANEL_OUTPUTS)
        words_of_rows = np.ascontiguousarray(
            words[numbers // PANEL_OUTPUTS, :, :, numbers % PANEL_OUTPUTS]
        )  # shape [rows, groups or pairs of groups, words]
        scales, codes = words_of_rows[:, :, :1].view(np.float32), words_of_rows[:, :, 1 + has_minimums :].copy().view(np.uint8)
        if has_float16:
            pairs = self.data.view(np.float16).reshape(len(self.data), groups // 2, -1, 2, PANEL_OUTPUTS)[:, :, 0]  # of scales
            scales = pairs[numbers // PANEL_OUTPUTS, :, :, numbers % PANEL_OUTPUTS].reshape(len(numbers), groups, 1).astype(np.float32)
            codes = codes.reshape(len(numbers), groups, -1)
        if bits == 4:  # four columns are in the low nibbles, the next four in the high nibbles
            quads = codes.reshape(*codes.shape[:2], -1, 1, 4)
            codes = np.concatenate([quads & np.uint8(15), quads >> np.uint8(4)], axis=3).reshape(*codes.shape[:2], self.group_size)
        shifted = codes.astype(np.int32) - np.int32(self.zero_point) if self.table is None else self.table[codes]
        values = shifted.astype(np.float32) * scales
        if has_minimums:
            values += words_of_rows[:, :, 1:2].view(np.float32)
        return values.reshape(len(numbers), self.columns)


def pack_weights(matrix: GroupedMatrix, num_threads: int, arena: Arena | None = None) -> PackedWeights:
    """Return a copy of `matrix` in panels; its groups have at most MAX_GROUP_SIZE columns."""
    has_float16 = matrix.super_blocks is None and matrix.bits == 4 and matrix.minimums is None and _are_exact_float16_pairs(matrix.scales)
    packed = _allocate(matrix, matrix.shape[0], has_float16=has_float16, arena=arena)
    if matrix.super_blocks is not None:
        _fill_super_blocks(packed, matrix, matrix.super_blocks, num_threads)
        return packed
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


def _pack_converted(blocks: StoredBlocks, packed: PackedWeights, num_threads: int) -> PackedWeights:
    """Fill the panels with groups that are made of some rows at a time."""

    def fill_range(begin: int, end: int) -> None:
        rows = slice(begin * PANEL_OUTPUTS, min(end * PANEL_OUTPUTS, packed.outputs))
        try:
            matrix = blocks.select_rows(rows).to_grouped_matrix()
        except CheckpointError:
            raise not_finite_error(blocks.where, rows.start, rows.stop - 1) from None
        _fill_groups(replace(packed, data=packed.data[begin:end], outputs=len(matrix.codes)), matrix, 1)

    _fill_panels(packed, fill_range, num_threads)
    return packed


def pack_gguf_blocks(blocks: StoredBlocks, num_threads: int, arena: Arena | None = None) -> PackedWeights:
    """Return the panels that `pack_weights` makes of the blocks' groups. The kernels read the blocks directly, if they know their type.

    Raises:
        CheckpointError: a scale is not finite.
        CapacityError: out of memory.
    """
    (outputs, columns), zero_row = blocks.shape, _groups_of_zero_row(blocks)
    packed = _allocate(zero_row, outputs, has_float16=_has_float16_scales(blocks, zero_row), arena=arena)
    if blocks.block_type.name in CONVERTED_TYPES:
        return _pack_converted(blocks, packed, num_threads)
    raw = blocks.raw if blocks.raw.strides[1] == 1 else np.ascontiguousarray(blocks.raw)
    order = None if blocks.row_order is None else np.ascontiguousarray(blocks.row_order, np.int64)
    places = None if blocks.run_order is None else np.argsort(blocks.run_order).astype(np.int32)
    address = [None if array is None else array.ctypes.data for array in (raw, order, places)]
    sizes = outputs, columns, packed.zero_point, packed.super_block_columns, _sign_bit_mask(zero_row), raw.strides[0]
    record, library, to = BlocksRecord(_GGUF_NUMBERS[blocks.block_type.name], packed.kind, *sizes, *address), kernels(), packed.data

    def fill_range(begin: int, end: int) -> None:
        wrong = library.paceline_pack_gguf_blocks(record, begin, end, to.shape[1], to.ctypes.data)
        if wrong >= 0:
            raise not_finite_error(blocks.where, wrong, wrong)
        if wrong == -2:
            raise CapacityError(f"{blocks.where} cannot be packed: out of memory; use a smaller model, or close other programs")
        assert wrong == -1  # unsupported block types were refused before
        if order is None and raw.nbytes > _LARGE_BYTES:
            drop_pages([raw[begin * PANEL_OUTPUTS : end * PANEL_OUTPUTS]])

    _fill_panels(packed, fill_range, num_threads)
    return packed


def packed_bytes(blocks: StoredBlocks) -> int:
    """Return the bytes `pack_gguf_blocks` takes at most; no weight is read."""
    zero_row = _groups_of_zero_row(blocks)
    has_float16 = blocks.block_type.name != "MXFP4" and _has_float16_scales(blocks, zero_row)  # for MXFP4 all scales would have to be read
    panel = _allocate(zero_row, PANEL_OUTPUTS, has_float16=has_float16)
    return -(-blocks.shape[0] // PANEL_OUTPUTS) * panel.data.nbytes


def _allocate(matrix: GroupedMatrix, outputs: int, *, has_float16: bool, arena: Arena | None = None) -> PackedWeights:
    """Return memory for `outputs` outputs in groups like those of `matrix`.

    Args:
        has_float16: float16 holds the scales exactly, and they can be stored in pairs.
        arena: where to allocate; None = in memory of their own.
    """
    _, columns = matrix.shape
    if matrix.super_blocks is not None:
        code_bits, super_block_columns = matrix.super_blocks.code_bits, columns // matrix.super_blocks.scales.shape[1]
        kind = _KINDS_SUPER_BLOCKS[code_bits, matrix.minimums is not None]
        panel_bytes, zero_point = (
            kernels().paceline_super_block_bytes(columns, super_block_columns, kind),
            _UNSIGNED_ZERO_POINTS.get(code_bits, matrix.zero_point),
        )
    else:
        kind = _KINDS_FLOAT32_SCALES[matrix.bits, matrix.minimums is not None] if matrix.table is None else MatrixKind.PANELS_4_BITS_TABLE
        kind, super_block_columns = _KINDS_FLOAT16_SCALES[kind] if kind in _KINDS_FLOAT16_SCALES and has_float16 else kind, 0
        panel_bytes = kernels().paceline_panel_bytes(columns, matrix.group_size, kind)
        zero_point = matrix.zero_point + _sign_bit_mask(matrix)
    zero_point = zero_point if matrix.table is None else -int(matrix.table.min())
    data = (empty if arena is None else arena.empty)((-(-outputs // PANEL_OUTPUTS), panel_bytes), np.uint8)
    return PackedWeights(kind, data, outputs, columns, matrix.group_size, zero_point, matrix.table, super_block_columns)


def _sign_bit_mask(matrix: GroupedMatrix) -> int:
    """Return the XOR mask that makes signed codes unsigned: 128, or 0 for unsigned codes."""
    return 128 if matrix.bits == 8 and matrix.codes.dtype == np.int8 else 0


def _fill_super_blocks(packed: PackedWeights, matrix: GroupedMatrix, blocks: SuperBlocks, num_threads: int) -> None:
    arrays = [_contiguous(array) for array in (matrix.codes, blocks.scales, blocks.minimums, blocks.factors, blocks.minimum_factors)]
    address = [None if array is None else array.ctypes.data for array in arrays]
    sizes = packed.kind, packed.outputs, packed.columns, packed.super_block_columns, packed.zero_point
    stored, library, to = SuperBlocksRecord(*sizes, arrays[0].strides[0], *address), kernels(), packed.data.ctypes.data
    _fill_panels(packed, lambda begin, end: library.paceline_fill_super_blocks(stored, begin, end, to), num_threads)


def _fill_panels(packed: PackedWeights, fill_range: Callable[[int, int], object], num_threads: int) -> None:
    """Call `fill_range(begin, end)` until all panels are filled."""
    data = packed.data

    def fill_some(begin: int) -> None:
        fill_range(begin, min(begin + _PANELS_PER_CALL, len(data)))

    if num_threads == 1:
        for begin in range(0, len(data), _PANELS_PER_CALL):
            fill_some(begin)
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(fill_some, range(0, len(data), _PANELS_PER_CALL)))


def _are_exact_float16_pairs(scales: NDArray[np.float32]) -> bool:
    """Return whether float16 holds the scales exactly, and a row has an even number: the kernels read two at a time."""
    if scales.shape[1] % 2:
        return False
    with np.errstate(over="ignore"):
        return bool(np.array_equal(scales.astype(np.float16), scales))


def _contiguous(array: Any) -> Any:
    return None if array is None else np.ascontiguousarray(array)


def _groups_of_zero_row(blocks: StoredBlocks) -> GroupedMatrix:
    """Return the groups of a row of zeros, from which the shapes and types of all rows are read."""
    zeros = np.zeros((1, blocks.raw.shape[1]), np.uint8)
    return StoredBlocks(zeros, blocks.block_type, blocks.where, run_order=blocks.run_order).to_grouped_matrix()


def _has_float16_scales(blocks: StoredBlocks, zero_row: GroupedMatrix) -> bool:
    """Return whether float16 holds the scales exactly, and a row has an even number: the kernels read two at a time."""
    if blocks.block_type.name in _FLOAT16_TYPES:
        return True
    if blocks.shape[1] // RUN % 2 or zero_row.group_size != RUN:
        return False
    if blocks.block_type.name == "MXFP4":
        exponents = (blocks.raw if blocks.row_order is None else blocks.raw[blocks.row_order])[:, :: blocks.block_type.num_bytes]
        return bool(_FLOAT16_EXPONENTS[0] <= exponents.min() and exponents.max() <= _FLOAT16_EXPONENTS[1])
    return blocks.block_type.num_items == RUN
