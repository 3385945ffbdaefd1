"""Weights in groups laid out as kernels/panels.c and super_blocks.c read them: 16 outputs side by side, one stream of scales and codes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.models.grouped import GroupedMatrix, SuperBlocks
from paceline.runtimes.native.library import kernels
from paceline.runtimes.native.records import Matrix, SuperBlocksRecord

OUTPUTS = 16
MAX_GROUP = 256
_KINDS = {(8, False): 9, (8, True): 10, (4, False): 11, (4, True): 12}  # bits, whether there are minimums
_TABLE_KIND = 13
_HALVES = {_KINDS[4, False]: 14, _TABLE_KIND: 15}  # the same with scales in float16
_SUPER_BLOCKS = {4: 16, 5: 17, 6: 18}  # bits of a code
_ZERO_POINTS = {4: 0, 5: 0, 6: 32}  # of their unsigned codes
NARROW_KINDS = frozenset((_KINDS[4, False], _KINDS[4, True], _HALVES[_KINDS[4, False]], *_SUPER_BLOCKS.values()))
"""Whose codes have at most six bits: where there are no dot products of bytes, kernels/byte_dot.h takes their rows otherwise."""
PANEL_KINDS = frozenset((*_KINDS.values(), _TABLE_KIND, *_HALVES.values(), *_SUPER_BLOCKS.values()))
_ALIGNMENT = 64
_PANELS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Panels:
    """A matrix in panels.

    Attributes:
        kind: as in kernels/native.h.
        data: [panels, bytes of a panel] uint8.
        outputs, columns, group, zero_point: of the matrix; the zero point of unsigned codes.
        table: see `GroupedMatrix`; with the zero point its values are unsigned.
        block: of super-blocks: columns that share float16 numbers; else 0.
    """

    kind: int
    data: NDArray[np.uint8]
    outputs: int
    columns: int
    group: int
    zero_point: int
    table: NDArray[np.int8] | None = None
    block: int = 0

    def matrix(self, out: int, bias: int | None) -> Matrix:
        """For products that go to buffer `out`; `bias`: address of the bias."""
        address, row_bytes = self.data.ctypes.data, self.data.shape[1]
        table = None if self.table is None else self.table.ctypes.data
        sizes = self.outputs, self.columns, self.group, self.zero_point
        return Matrix(self.kind, *sizes, out, self.block, row_bytes, address, None, None, bias, table)

    def first(self, count: int) -> "Panels":
        """Its first `count` outputs, where they lie."""
        return replace(self, data=self.data[: -(-count // OUTPUTS)], outputs=count)

    def rows(self, numbers: NDArray[np.int32]) -> NDArray[np.float32]:
        """The exact values of some rows, [len(numbers), columns], as `GroupedMatrix.values` computes them."""
        if self.block:
            found = np.empty((len(numbers), self.columns), np.float32)
            wanted = np.ascontiguousarray(numbers, np.int32)
            kernels().paceline_super_block_rows(self.matrix(0, None), wanted.ctypes.data, len(wanted), found.ctypes.data)
            return found
        bits, has_minimums = next((key for key, kind in _KINDS.items() if kind == self.kind), (4, False))
        has_halves, groups = self.kind in _HALVES.values(), self.columns // self.group
        words = self.data.view(np.uint32).reshape(len(self.data), groups // 2 if has_halves else groups, -1, OUTPUTS)
        own = np.ascontiguousarray(words[numbers // OUTPUTS, :, :, numbers % OUTPUTS])  # [rows, groups or pairs of them, words]
        scales, codes = own[:, :, :1].view(np.float32), own[:, :, 1 + has_minimums :].copy().view(np.uint8)
        if has_halves:
            pairs = self.data.view(np.float16).reshape(len(self.data), groups // 2, -1, 2, OUTPUTS)[:, :, 0]  # of scales
            scales = pairs[numbers // OUTPUTS, :, :, numbers % OUTPUTS].reshape(len(numbers), groups, 1).astype(np.float32)
            codes = codes.reshape(len(numbers), groups, -1)
        if bits == 4:  # four columns in the low halves, four in the high ones
            quads = codes.reshape(*codes.shape[:2], -1, 1, 4)
            codes = np.concatenate([quads & np.uint8(15), quads >> np.uint8(4)], axis=3).reshape(*codes.shape[:2], self.group)
        shifted = codes.astype(np.int32) - np.int32(self.zero_point) if self.table is None else self.table[codes]
        values = shifted.astype(np.float32) * scales
        if has_minimums:
            values += own[:, :, 1:2].view(np.float32)
        return values.reshape(len(numbers), self.columns)


def in_panels(matrix: GroupedMatrix, num_threads: int) -> Panels:
    """A copy of `matrix` in panels; its groups have at most MAX_GROUP columns."""
    if matrix.super_blocks is not None:
        return _in_super_blocks(matrix, matrix.super_blocks, num_threads)
    outputs, columns = matrix.shape
    kind = _KINDS[matrix.bits, matrix.minimums is not None] if matrix.table is None else _TABLE_KIND
    if kind in _HALVES and _fit_float16(matrix.scales):
        kind = _HALVES[kind]
    flipped = 128 if matrix.bits == 8 and matrix.codes.dtype == np.int8 else 0
    codes, scales, minimums = (_whole(array) for array in (matrix.codes, matrix.scales, matrix.minimums))
    address = [None if array is None else array.ctypes.data for array in (codes, scales, minimums)]
    stored = Matrix(kind, outputs, columns, matrix.group, 0, 0, 0, codes.strides[0], *address, None, None)
    library = kernels()
    data = _aligned(-(-outputs // OUTPUTS), library.paceline_panel_bytes(columns, matrix.group, kind))
    _fill(data, lambda begin, end: library.paceline_fill_panels(stored, kind, flipped, begin, end, data.ctypes.data), num_threads)
    zero_point = matrix.zero_point + flipped if matrix.table is None else -int(matrix.table.min())
    return Panels(kind, data, outputs, columns, matrix.group, zero_point, matrix.table)


def _in_super_blocks(matrix: GroupedMatrix, blocks: SuperBlocks, num_threads: int) -> Panels:
    (outputs, columns), kind, zero_point = matrix.shape, _SUPER_BLOCKS[blocks.code_bits], _ZERO_POINTS[blocks.code_bits]
    block = columns // blocks.scales.shape[1]
    arrays = [_whole(array) for array in (matrix.codes, blocks.scales, blocks.minimums, blocks.factors, blocks.minimum_factors)]
    address = [None if array is None else array.ctypes.data for array in arrays]
    stored = SuperBlocksRecord(kind, outputs, columns, block, zero_point, arrays[0].strides[0], *address)
    library = kernels()
    data = _aligned(-(-outputs // OUTPUTS), library.paceline_super_block_bytes(columns, block, kind))
    _fill(data, lambda begin, end: library.paceline_fill_super_blocks(stored, begin, end, data.ctypes.data), num_threads)
    return Panels(kind, data, outputs, columns, matrix.group, zero_point, block=block)


def _fill(data: NDArray[np.uint8], fill: Callable[[int, int], None], num_threads: int) -> None:
    """Let `fill` do all panels, some at a time."""

    def fill_some(begin: int) -> None:
        fill(begin, min(begin + _PANELS_AT_ONCE, len(data)))

    if num_threads == 1:
        for begin in range(0, len(data), _PANELS_AT_ONCE):
            fill_some(begin)
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(fill_some, range(0, len(data), _PANELS_AT_ONCE)))


def _fit_float16(scales: NDArray[np.float32]) -> bool:
    """Whether scales lose nothing in float16, and can lie in pairs."""
    if scales.shape[1] % 2:
        return False
    with np.errstate(over="ignore"):
        return bool(np.array_equal(scales.astype(np.float16), scales))


def _whole(array: Any) -> Any:
    return None if array is None else np.ascontiguousarray(array)


def _aligned(rows: int, row_bytes: int) -> NDArray[np.uint8]:
    """[rows, row_bytes] that begins at a cache line."""
    memory = np.empty(rows * row_bytes + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + rows * row_bytes].reshape(rows, row_bytes)
