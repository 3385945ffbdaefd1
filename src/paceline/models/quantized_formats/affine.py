"""Integer codes of 2 to 8 bits with a scale and a zero point, or a minimum, for each group of columns."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.grouped import RUN_COLUMNS, GroupedMatrix, pack_nibbles, pack_pairs_in_runs
from paceline.models.quantized_formats.module import PackedModule
from paceline.models.storage.packed_matrix import Floats, PackedMatrix, RowSelection

_KERNEL_GROUP_SIZES = (128, 64, 32, 16)
_LOW_MANTISSA_MASK = np.uint32(0x1FF)  # mantissa bits that must be 0, so that products `scale * code` and their sums are exact in float32

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class AffineRows:
    """Some rows of an `AffineMatrix`, whose values are `scale * (code - zero_point)` or `scale * code + minimum`.

    Attributes:
        packed_codes: [n, K * bits / 8] bytes, lowest bits first.
        scales: [n, groups].
        zero_points: [n, groups], or one number for all groups.
        minimums: [n, groups]; None = values have zero points instead.
    """

    packed_codes: Bytes
    scales: Floats
    zero_points: NDArray[np.int32] | int = 0
    minimums: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineMatrix:
    """A matrix of integer codes in a checkpoint. Its values are read only when `read_rows` is called.

    Attributes:
        error_location: file and tensor name, for errors.
        shape, arrays: [rows, columns], and the stored arrays.
        bits: number of bits of a stored code.
        group_size: number of columns that share a scale.
        zero_point: common zero point of all groups; None = each group has its own zero point or minimum.
        has_minimums: groups have minimums instead of zero points.
        has_15_bit_scales: scales have at most 15 significant bits, as float16 and bfloat16 do.
        column_groups: [K] group index of each column (GPTQ's g_idx); None = groups are consecutive columns.
        read_rows: function that returns the rows with the given indices.
    """

    error_location: str
    shape: tuple[int, int]
    arrays: tuple[NDArray[Any], ...]
    bits: int
    group_size: int
    zero_point: int | None = None
    has_minimums: bool = False
    has_15_bit_scales: bool = True
    column_groups: NDArray[np.int64] | None = None
    read_rows: Callable[[RowSelection], AffineRows]

    def to_packed_matrix(self) -> PackedMatrix:
        """Return a matrix that is read as quantised groups, or as floats if the kernels do not support its groups."""
        columns, kernel_group_size = self.shape[1], self._kernel_group_size()
        arrays = (*self.arrays, np.array([[self.bits, self.group_size, -1 if self.zero_point is None else self.zero_point]]))
        memory_bits = 4 if self.bits <= 4 and columns % RUN_COLUMNS == 0 else 8
        subtracts_zeros = self.zero_point is None and not self.has_minimums and not self.has_15_bit_scales
        if kernel_group_size is None or (subtracts_zeros and self.bits > 4):
            return PackedMatrix(self.error_location, self.shape, None, 0, arrays, self._dequantize)
        has_minimums = self.zero_point is None and not subtracts_zeros
        memory_bits = 8 if subtracts_zeros else memory_bits
        row_bytes = columns * memory_bits // 8 + columns // kernel_group_size * (8 if has_minimums else 4)

        def read_rows(rows: RowSelection) -> GroupedMatrix:
            return self._to_grouped_matrix(self.read_rows(rows), kernel_group_size, memory_bits, subtracts_zeros=subtracts_zeros)

        return PackedMatrix(self.error_location, self.shape, memory_bits, row_bytes, arrays, read_rows)

    def _kernel_group_size(self) -> int | None:
        """Return the largest group size of the kernels that divides `group_size`; None = there is none, so floats are used."""
        if self.column_groups is not None:
            return None
        shared = math.gcd(self.group_size, self.shape[1])
        return next((group_size for group_size in _KERNEL_GROUP_SIZES if shared % group_size == 0), None)

    def _to_grouped_matrix(self, rows: AffineRows, kernel_group_size: int, memory_bits: int, *, subtracts_zeros: bool) -> GroupedMatrix:
        num_groups = self.shape[1] // kernel_group_size
        scales = _repeat_groups(rows.scales, num_groups, kernel_group_size, self.group_size)
        minimums = None if rows.minimums is None else _repeat_groups(rows.minimums, num_groups, kernel_group_size, self.group_size)
        if subtracts_zeros:
            assert not isinstance(rows.zero_points, int)
            zeros = np.repeat(rows.zero_points, self.group_size, 1)[:, : self.shape[1]]
            return GroupedMatrix((self._unpack_codes(rows) - zeros).astype(np.int8), scales, None, 8)
        if self.zero_point is None and minimums is None:
            assert not isinstance(rows.zero_points, int)
            minimums = -(scales * _repeat_groups(rows.zero_points.astype(np.float32), num_groups, kernel_group_size, self.group_size))
        if memory_bits == 4 and self.bits == 4:  # 4-bit codes stay packed: only their order changes
            return GroupedMatrix(pack_pairs_in_runs(rows.packed_codes), scales, minimums, memory_bits, self.zero_point or 0)
        codes = self._unpack_codes(rows)
        codes = pack_nibbles(codes) if memory_bits == 4 else codes
        return GroupedMatrix(codes, scales, minimums, memory_bits, self.zero_point or 0)

    def _unpack_codes(self, rows: AffineRows) -> Bytes:
        return unpack_codes(rows.packed_codes, self.bits, self.shape[1])

    def _dequantize(self, rows: RowSelection) -> Floats:
        stored, columns = self.read_rows(rows), self.shape[1]
        groups = np.arange(columns) // self.group_size if self.column_groups is None else self.column_groups
        codes = self._unpack_codes(stored).astype(np.int32)
        if stored.minimums is not None:
            return stored.scales[:, groups] * codes.astype(np.float32) + stored.minimums[:, groups]
        zeros = stored.zero_points if isinstance(stored.zero_points, int) else stored.zero_points[:, groups]
        return stored.scales[:, groups] * (codes - zeros).astype(np.float32)


def has_short_mantissas(scales: NDArray[Any]) -> bool:
    """Return whether scales have at most 15 significant bits, so that `-scale * zero point` is exact in float32."""
    return scales.dtype != np.float32 or not (np.ascontiguousarray(scales).view(np.uint32) & _LOW_MANTISSA_MASK).any()


def unpack_codes(packed_codes: Bytes, bits: int, count: int) -> Bytes:
    """Unpack `count` codes of `bits` bits from each row of bytes, lowest bits first. A code may be in two adjacent bytes."""
    if bits == 8:
        return np.ascontiguousarray(packed_codes[:, :count])
    codes_per_cycle = 8 // math.gcd(8, bits)  # the smallest number of codes that fills whole bytes
    cycle_bytes = codes_per_cycle * bits // 8
    cycles = -(-count // codes_per_cycle)
    whole_cycles = packed_codes[:, : cycles * cycle_bytes]
    if whole_cycles.shape[1] < cycles * cycle_bytes:
        whole_cycles = np.pad(whole_cycles, ((0, 0), (0, cycles * cycle_bytes - whole_cycles.shape[1])))
    cycle = whole_cycles.reshape(len(packed_codes), cycles, cycle_bytes)
    codes = np.empty((len(packed_codes), cycles, codes_per_cycle), np.uint8)
    for number in range(codes_per_cycle):
        first, shift = divmod(number * bits, 8)
        value = cycle[:, :, first] >> np.uint8(shift)
        if shift + bits > 8:
            value = value | cycle[:, :, first + 1] << np.uint8(8 - shift)
        codes[:, :, number] = value & np.uint8(2**bits - 1)
    return codes.reshape(len(packed_codes), -1)[:, :count]


def words_as_bytes(words: NDArray[np.uint32]) -> Bytes:
    return np.ascontiguousarray(words).view(np.uint8)


def read_column_groups(module: PackedModule, suffix: str, columns: int, group_size: int, num_groups: int) -> NDArray[np.int64] | None:
    """Return the group index of each column from the tensor `suffix` (g_idx); None if groups are consecutive columns.

    Without this tensor, and if it has only zeros, groups are consecutive columns.

    Raises:
        CheckpointError: There is not one entry for each column, or an entry is not below `num_groups`.
    """
    if not module.has_tensor(suffix):
        return None
    where, groups = module.describe_tensor(suffix), module.read_tensor(suffix, "I32", ndim=1).view(np.int32)
    if groups.shape != (columns,) or not columns or not (groups.min() >= 0 and groups.max() < num_groups):
        raise CheckpointError(
            f"{where} has {groups.size} numbers from {groups.min(initial=0)} to {groups.max(initial=0)}, one below {num_groups} is "
            f"expected for each of {columns} columns; the file is damaged, download it again"
        )
    in_order = np.arange(columns) // group_size
    return None if not groups.any() or np.array_equal(groups, in_order) else groups.astype(np.int64)


def _repeat_groups(values: Floats, num_groups: int, kernel_group_size: int, group_size: int) -> Floats:
    """Return scales or minimums [n, num_groups], repeated because each stored group is split into several groups for the kernels."""
    if values.shape[1] == num_groups:
        return values
    return values[:, np.arange(num_groups) * kernel_group_size // group_size]
