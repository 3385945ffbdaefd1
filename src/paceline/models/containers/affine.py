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

_KERNEL_GROUP_SIZES = (128, 64, 32, 16)
_LOW_MANTISSA_BITS = np.uint32(0x1FF)  # mantissa bits that must be 0, so that `scale * code` and sums of it are exact in float32

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
    """A matrix of integer codes in a checkpoint, described before its values are read.

    Attributes:
        where, shape, arrays: as in `PackedMatrix`.
        bits: bits of a stored code.
        group_size: columns that share a scale.
        zero: zero point of all groups; None = each group has its own zero point, or a minimum.
        has_minimums: groups have minimums.
        has_short_scales: scales have at most 15 significant bits, as float16 and bfloat16 do.
        column_groups: [K] group of each column, if they are not in order (GPTQ's g_idx).
        read: returns the stored rows with the given indices.
    """

    where: str
    shape: tuple[int, int]
    arrays: tuple[NDArray[Any], ...]
    bits: int
    group_size: int
    zero: int | None = None
    has_minimums: bool = False
    has_short_scales: bool = True
    column_groups: NDArray[np.int64] | None = None
    read: Callable[[Rows], AffineRows]

    def matrix(self) -> PackedMatrix:
        """Return the matrix as groups of codes; as floats if groups are not contiguous or no multiple of 16 columns."""
        columns, kernel_group_size = self.shape[1], self._kernel_group_size()
        arrays = (*self.arrays, np.array([[self.bits, self.group_size, -1 if self.zero is None else self.zero]]))
        width = 4 if self.bits <= 4 and columns % RUN == 0 else 8
        subtracts_zeros = self.zero is None and not self.has_minimums and not self.has_short_scales
        if kernel_group_size is None or (subtracts_zeros and self.bits > 4):
            return PackedMatrix(self.where, self.shape, None, 0, arrays, self._dequantize)
        has_minimums = self.zero is None and not subtracts_zeros
        width = 8 if subtracts_zeros else width
        row_bytes = columns * width // 8 + columns // kernel_group_size * (8 if has_minimums else 4)

        def read(rows: Rows) -> GroupedMatrix:
            return self._to_grouped_matrix(self.read(rows), kernel_group_size, width, subtracts_zeros=subtracts_zeros)

        return PackedMatrix(self.where, self.shape, width, row_bytes, arrays, read)

    def _kernel_group_size(self) -> int | None:
        """Return the group size for the kernels: at most 128, because activations are quantised per group; None = use floats."""
        if self.column_groups is not None:
            return None
        shared = math.gcd(self.group_size, self.shape[1])
        return next((group_size for group_size in _KERNEL_GROUP_SIZES if shared % group_size == 0), None)

    def _to_grouped_matrix(self, rows: AffineRows, kernel_group_size: int, width: int, *, subtracts_zeros: bool) -> GroupedMatrix:
        count = self.shape[1] // kernel_group_size
        scales = _repeat_for_kernel_groups(rows.scales, count, kernel_group_size, self.group_size)
        minimums = None if rows.minimums is None else _repeat_for_kernel_groups(rows.minimums, count, kernel_group_size, self.group_size)
        if subtracts_zeros:
            assert not isinstance(rows.zeros, int)
            zeros = np.repeat(rows.zeros, self.group_size, 1)[:, : self.shape[1]]
            return GroupedMatrix((self._unpack_codes(rows) - zeros).astype(np.int8), scales, None, 8)
        if self.zero is None and minimums is None:
            assert not isinstance(rows.zeros, int)
            minimums = -(scales * _repeat_for_kernel_groups(rows.zeros.astype(np.float32), count, kernel_group_size, self.group_size))
        if width == 4 and self.bits == 4:  # both formats have 4-bit codes; only their order differs
            return GroupedMatrix(runs_of_pairs(rows.stream), scales, minimums, width, self.zero or 0)
        codes = self._unpack_codes(rows)
        codes = pack_nibbles(codes) if width == 4 else codes
        return GroupedMatrix(codes, scales, minimums, width, self.zero or 0)

    def _unpack_codes(self, rows: AffineRows) -> Bytes:
        return unpack_codes(rows.stream, self.bits, self.shape[1])

    def _dequantize(self, rows: Rows) -> Floats:
        found, columns = self.read(rows), self.shape[1]
        groups = np.arange(columns) // self.group_size if self.column_groups is None else self.column_groups
        codes = self._unpack_codes(found).astype(np.int32)
        if found.minimums is not None:
            return found.scales[:, groups] * codes.astype(np.float32) + found.minimums[:, groups]
        zeros = found.zeros if isinstance(found.zeros, int) else found.zeros[:, groups]
        return found.scales[:, groups] * (codes - zeros).astype(np.float32)


def has_short_mantissas(scales: NDArray[Any]) -> bool:
    """Return whether scales have at most 15 significant bits, so that `-scale * zero point` is exact in float32."""
    return scales.dtype != np.float32 or not (np.ascontiguousarray(scales).view(np.uint32) & _LOW_MANTISSA_BITS).any()


def unpack_codes(stream: Bytes, bits: int, count: int) -> Bytes:
    """Unpack codes of `bits` bits from bytes [n, bytes] to [n, count], lowest bits first. Codes may cross bytes."""
    if bits == 8:
        return np.ascontiguousarray(stream[:, :count])
    codes_per_cycle = 8 // math.gcd(8, bits)  # number of codes that fill the fewest whole bytes
    cycle_bytes = codes_per_cycle * bits // 8
    cycles = -(-count // codes_per_cycle)
    taken = stream[:, : cycles * cycle_bytes]
    if taken.shape[1] < cycles * cycle_bytes:
        taken = np.pad(taken, ((0, 0), (0, cycles * cycle_bytes - taken.shape[1])))
    groups = taken.reshape(len(stream), cycles, cycle_bytes)
    codes = np.empty((len(stream), cycles, codes_per_cycle), np.uint8)
    for number in range(codes_per_cycle):
        begin, shift = divmod(number * bits, 8)
        value = groups[:, :, begin] >> np.uint8(shift)
        if shift + bits > 8:
            value = value | groups[:, :, begin + 1] << np.uint8(8 - shift)
        codes[:, :, number] = value & np.uint8(2**bits - 1)
    return codes.reshape(len(stream), -1)[:, :count]


def words_as_bytes(words: NDArray[np.uint32]) -> Bytes:
    """Return 32-bit words [n, words] as the bytes of each row."""
    return np.ascontiguousarray(words).view(np.uint8)


def column_group_numbers(groups: NDArray[np.int32], columns: int, group_size: int, count: int, where: str) -> NDArray[np.int64] | None:
    """Return the group of each column (g_idx); None if the groups are contiguous and in order, or all 0.

    Raises:
        CheckpointError: There is not one entry for each column, or one is not below `count`.
    """
    if groups.shape != (columns,) or not columns or not (groups.min() >= 0 and groups.max() < count):
        raise CheckpointError(
            f"{where} has {groups.size} numbers from {groups.min(initial=0)} to {groups.max(initial=0)}, one below {count} is expected for "
            f"each of {columns} columns; the file is damaged, download it again"
        )
    in_order = np.arange(columns) // group_size
    return None if not groups.any() or np.array_equal(groups, in_order) else groups.astype(np.int64)


def _repeat_for_kernel_groups(values: Floats, count: int, kernel_group_size: int, group_size: int) -> Floats:
    """Repeat the numbers of each stored group for the smaller groups that the kernels split it into, `count` in a row."""
    if values.shape[1] == count:
        return values
    return values[:, np.arange(count) * kernel_group_size // group_size]
