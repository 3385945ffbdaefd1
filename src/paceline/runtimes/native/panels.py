"""Weights in groups laid out as kernels/panels.c and super_blocks.c read them: 16 outputs side by side, one stream of scales and codes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.models.grouped import GroupedMatrix, SuperBlocks
from paceline.runtimes.native.aligned import Arena, address_of, empty
from paceline.runtimes.native.library import kernels
from paceline.runtimes.native.records import Matrix, SuperBlocksRecord

OUTPUTS = 16
MAX_GROUP = 256
_KINDS = {(8, False): 9, (8, True): 10, (4, False): 11, (4, True): 12}  # bits, whether there are minimums
_TABLE_KIND = 13
_HALVES = {_KINDS[4, False]: 14, _TABLE_KIND: 15}  # the same with scales in float16
_SUPER_BLOCKS = {(4, True): 16, (5, True): 17, (6, False): 18, (2, True): 19, (3, False): 20, (4, False): 21}  # bits, minimums
_ZERO_POINTS = {6: 32}  # of unsigned codes, where it is not that of the stored ones
NARROW_KINDS = frozenset((_KINDS[4, False], _KINDS[4, True], _HALVES[_KINDS[4, False]], *range(16, 21)))
"""Whose codes have at most six bits: where there are no dot products of bytes, kernels/byte_dot.h takes their rows otherwise."""
TABLE_KINDS = frozenset((_TABLE_KIND, _HALVES[_TABLE_KIND], _SUPER_BLOCKS[4, False]))
"""Whose codes stand for values of a table: there rows are taken in a third way."""
PANEL_KINDS = frozenset((*_KINDS.values(), _TABLE_KIND, *_HALVES.values(), *_SUPER_BLOCKS.values()))
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
    _record: Matrix = field(init=False, repr=False, compare=False)  # for reading rows

    def __post_init__(self) -> None:
        object.__setattr__(self, "_record", self.matrix(0, None))

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
            wanted, found = np.array(numbers, np.int32), np.empty((len(numbers), self.columns), np.float32)
            kernels().paceline_super_block_rows(self._record, address_of(wanted), len(wanted), address_of(found))
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


def empty_panels(matrix: GroupedMatrix, outputs: int, *, has_halves: bool, arena: Arena | None = None) -> Panels:
    """Room for so many outputs in groups like those of `matrix`, which have at most MAX_GROUP columns.

    Args:
        has_halves: scales lose nothing in float16, and can lie in pairs.
        arena: where; None = in memory of their own.
    """
    _, columns = matrix.shape
    if matrix.super_blocks is not None:
        code_bits, block = matrix.super_blocks.code_bits, columns // matrix.super_blocks.scales.shape[1]
        kind = _SUPER_BLOCKS[code_bits, matrix.minimums is not None]
        panel_bytes, zero_point = kernels().paceline_super_block_bytes(columns, block, kind), _ZERO_POINTS.get(code_bits, matrix.zero_point)
    else:
        kind = _KINDS[matrix.bits, matrix.minimums is not None] if matrix.table is None else _TABLE_KIND
        kind, block = _HALVES[kind] if kind in _HALVES and has_halves else kind, 0
        panel_bytes = kernels().paceline_panel_bytes(columns, matrix.group, kind)
        zero_point = matrix.zero_point + flipped(matrix)
    zero_point = zero_point if matrix.table is None else -int(matrix.table.min())
    data = (empty if arena is None else arena.empty)((-(-outputs // OUTPUTS), panel_bytes), np.uint8)
    return Panels(kind, data, outputs, columns, matrix.group, zero_point, matrix.table, block)


def flipped(matrix: GroupedMatrix) -> int:
    """What makes its codes unsigned."""
    return 128 if matrix.bits == 8 and matrix.codes.dtype == np.int8 else 0


def in_panels(matrix: GroupedMatrix, num_threads: int, arena: Arena | None = None) -> Panels:
    """A copy of `matrix` in panels; its groups have at most MAX_GROUP columns."""
    outputs, columns = matrix.shape
    has_halves = matrix.super_blocks is None and matrix.bits == 4 and matrix.minimums is None and _fit_float16(matrix.scales)
    panels = empty_panels(matrix, outputs, has_halves=has_halves, arena=arena)
    if matrix.super_blocks is not None:
        _fill_super_blocks(panels, matrix, matrix.super_blocks, num_threads)
        return panels
    codes, scales, minimums = (_whole(array) for array in (matrix.codes, matrix.scales, matrix.minimums))
    address = [None if array is None else array.ctypes.data for array in (codes, scales, minimums)]
    stored = Matrix(panels.kind, outputs, columns, matrix.group, 0, 0, 0, codes.strides[0], *address, None, None)
    library, to = kernels(), panels.data.ctypes.data
    fill(panels, lambda begin, end: library.paceline_fill_panels(stored, panels.kind, flipped(matrix), begin, end, to), num_threads)
    return panels


def _fill_super_blocks(panels: Panels, matrix: GroupedMatrix, blocks: SuperBlocks, num_threads: int) -> None:
    arrays = [_whole(array) for array in (matrix.codes, blocks.scales, blocks.minimums, blocks.factors, blocks.minimum_factors)]
    address = [None if array is None else array.ctypes.data for array in arrays]
    sizes = panels.kind, panels.outputs, panels.columns, panels.block, panels.zero_point
    stored, library, to = SuperBlocksRecord(*sizes, arrays[0].strides[0], *address), kernels(), panels.data.ctypes.data
    fill(panels, lambda begin, end: library.paceline_fill_super_blocks(stored, begin, end, to), num_threads)


def fill(panels: Panels, fill_range: Callable[[int, int], object], num_threads: int) -> None:
    """Let `fill_range` fill all panels, some at a time."""
    data = panels.data

    def fill_some(begin: int) -> None:
        fill_range(begin, min(begin + _PANELS_AT_ONCE, len(data)))

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
