"""Integer codes of 2 to 8 bits with a scale and a zero point, or a minimum, for each group of columns."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.grouped import RUN, GroupedMatrix, pack_nibbles, runs_of_pairs
from paceline.models.storage.packed_matrix import Floats, PackedMatrix, Rows

_GROUPS = (128, 64, 32, 16)
_MOST_BITS = np.uint32(0x1FF)  # lowest bits of a float32 that must be 0 for exact products and sums of a scale with codes

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class AffineRows:
    """Rows [n, K] of values `scale * (code - zero)` or `scale * code + minimum`.

    Attributes:
        stream: [n, K * bits / 8] codes, lowest bits first.
        scales: [n, groups].
        zeros: [n, groups] integers, or one for all.
        minimums: [n, groups], if there are no zero points.
    """

    stream: Bytes
    scales: Floats
    zeros: NDArray[np.int32] | int = 0
    minimums: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """The format of an affine matrix, known before it is read.

    Attributes:
        where, shape, arrays: as in `PackedMatrix`.
        bits: of a stored code.
        group: columns that share a scale.
        zero: of all groups; None = each group has its own, or a minimum.
        has_minimums: groups have minimums.
        has_short_scales: scales have at most 15 significant bits, as float16 and bfloat16 do.
        column_groups: [K] group of each column, if they are not in order (GPTQ's g_idx).
        read: returns some stored rows.
    """

    where: str
    shape: tuple[int, int]
    arrays: tuple[NDArray[Any], ...]
    bits: int
    group: int
    zero: int | None = None
    has_minimums: bool = False
    has_short_scales: bool = True
    column_groups: NDArray[np.int64] | None = None
    read: Callable[[Rows], AffineRows]

    def matrix(self) -> PackedMatrix:
        """Return the matrix in groups with the file's values; in floats if groups are not contiguous or no multiple of 16 columns."""
        columns, own = self.shape[1], self._group()
        arrays = (*self.arrays, np.array([[self.bits, self.group, -1 if self.zero is None else self.zero]]))
        width = 4 if self.bits <= 4 and columns % RUN == 0 else 8
        folds = self.zero is None and not self.has_minimums and not self.has_short_scales
        if own is None or (folds and self.bits > 4):
            return PackedMatrix(self.where, self.shape, None, 0, arrays, self._values)
        has_minimums = self.zero is None and not folds
        width = 8 if folds else width
        row_bytes = columns * width // 8 + columns // own * (8 if has_minimums else 4)

        def read(rows: Rows) -> GroupedMatrix:
            return self._groups(self.read(rows), own, width, folds=folds)

        return PackedMatrix(self.where, self.shape, width, row_bytes, arrays, read)

    def _group(self) -> int | None:
        """Return the columns of our groups: at most 128, because activations are rounded group by group."""
        if self.column_groups is not None:
            return None
        shared = math.gcd(self.group, self.shape[1])
        return next((group for group in _GROUPS if shared % group == 0), None)

    def _groups(self, rows: AffineRows, own: int, width: int, *, folds: bool) -> GroupedMatrix:
        count = self.shape[1] // own
        scales = _repeated(rows.scales, count, own, self.group)
        minimums = None if rows.minimums is None else _repeated(rows.minimums, count, own, self.group)
        if folds:
            assert not isinstance(rows.zeros, int)
            zeros = np.repeat(rows.zeros, self.group, 1)[:, : self.shape[1]]
            return GroupedMatrix((self._codes(rows) - zeros).astype(np.int8), scales, None, 8)
        if self.zero is None and minimums is None:
            assert not isinstance(rows.zeros, int)
            minimums = -(scales * _repeated(rows.zeros.astype(np.float32), count, own, self.group))
        if width == 4 and self.bits == 4:  # only the order of the codes differs
            return GroupedMatrix(runs_of_pairs(rows.stream), scales, minimums, width, self.zero or 0)
        codes = self._codes(rows)
        codes = pack_nibbles(codes) if width == 4 else codes
        return GroupedMatrix(codes, scales, minimums, width, self.zero or 0)

    def _codes(self, rows: AffineRows) -> Bytes:
        return unpack_stream(rows.stream, self.bits, self.shape[1])

    def _values(self, rows: Rows) -> Floats:
        found, columns = self.read(rows), self.shape[1]
        groups = np.arange(columns) // self.group if self.column_groups is None else self.column_groups
        codes = self._codes(found).astype(np.int32)
        if found.minimums is not None:
            return found.scales[:, groups] * codes.astype(np.float32) + found.minimums[:, groups]
        zeros = found.zeros if isinstance(found.zeros, int) else found.zeros[:, groups]
        return found.scales[:, groups] * (codes - zeros).astype(np.float32)


def is_short(scales: NDArray[Any]) -> bool:
    """Return whether scales have so few significant bits that minimums are exact."""
    return scales.dtype != np.float32 or not (np.ascontiguousarray(scales).view(np.uint32) & _MOST_BITS).any()


def unpack_stream(stream: Bytes, bits: int, count: int) -> Bytes:
    """Unpack codes of `bits` bits from bytes [n, bytes] to [n, count], lowest bits first. Codes may cross bytes."""
    if bits == 8:
        return np.ascontiguousarray(stream[:, :count])
    in_cycle = 8 // math.gcd(8, bits)  # codes in the fewest whole bytes
    cycle_bytes = in_cycle * bits // 8
    cycles = -(-count // in_cycle)
    taken = stream[:, : cycles * cycle_bytes]
    if taken.shape[1] < cycles * cycle_bytes:
        taken = np.pad(taken, ((0, 0), (0, cycles * cycle_bytes - taken.shape[1])))
    groups = taken.reshape(len(stream), cycles, cycle_bytes)
    codes = np.empty((len(stream), cycles, in_cycle), np.uint8)
    for number in range(in_cycle):
        begin, shift = divmod(number * bits, 8)
        value = groups[:, :, begin] >> np.uint8(shift)
        if shift + bits > 8:
            value = value | groups[:, :, begin + 1] << np.uint8(8 - shift)
        codes[:, :, number] = value & np.uint8(2**bits - 1)
    return codes.reshape(len(stream), -1)[:, :count]


def as_stream(words: NDArray[np.uint32]) -> Bytes:
    """Return words [n, words] as bytes of each row."""
    return np.ascontiguousarray(words).view(np.uint8)


def order_of(groups: NDArray[np.int32], columns: int, group: int, count: int, where: str) -> NDArray[np.int64] | None:
    """Return the group of each column (g_idx); None if the groups are contiguous and in order, or all 0.

    Raises:
        CheckpointError: There is not one entry for each column, or one is not below `count`.
    """
    if groups.shape != (columns,) or not columns or not (groups.min() >= 0 and groups.max() < count):
        raise CheckpointError(
            f"{where} has {groups.size} numbers from {groups.min(initial=0)} to {groups.max(initial=0)}, one below {count} is expected for "
            f"each of {columns} columns; the file is damaged, download it again"
        )
    in_order = np.arange(columns) // group
    return None if not groups.any() or np.array_equal(groups, in_order) else groups.astype(np.int64)


def _repeated(values: Floats, count: int, own: int, group: int) -> Floats:
    """Repeat numbers of groups for the `count` smaller groups in each."""
    if values.shape[1] == count:
        return values
    return values[:, np.arange(count) * own // group]
