"""Weight matrices of integer codes with a scale for each group of columns, as the kernels read them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

RUN_COLUMNS = 32
"""Number of columns in a run, whose 4-bit codes take 16 bytes: byte j has code j in its low 4 bits and code j + 16 in its high 4 bits."""
SUPER_BLOCK_COLUMNS = 256
"""Number of columns in a super-block of a K-quant (GGUF's types Q2_K to Q6_K)."""
DOUBLED_E2M1_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the values of the 16 codes of E2M1, so that they are integers. The values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
Source: OCP Microscaling Formats 1.0, section 5.3.3."""
_HALF_SUPER_BLOCK_COLUMNS = SUPER_BLOCK_COLUMNS // 2
_HALF_SUPER_BLOCK_RUNS = _HALF_SUPER_BLOCK_COLUMNS // RUN_COLUMNS
_SCALE_BYTES = {(2, True): (4, 16), (3, False): (0, 16), (4, False): (4, 4), (4, True): (4, 12), (5, True): (4, 12), (6, False): (0, 20)}
"""By (bits of a code, has minimums): bytes of each float16 number in the scales of a super-block of the kernels, and bytes of the rest."""


@dataclass(frozen=True, slots=True)
class SuperBlocks:
    """The scales and minimums of a K-quant, as GGUF stores them: as products of a float16 number and a small integer.

    The scale of a group is scales * factors, its minimum -(minimums * minimum_factors). Both products are exact in float32.

    Attributes:
        code_bits: number of bits of a code in the file, 2 to 6. `GroupedMatrix.codes` has 4 or 8 bits.
        scales: [N, K / 256] float16, or [N, K / 128] after `reorder_runs`.
        factors: [N, K / group_size] uint8 of 4 or 6 bits; int8 if there are no minimums.
        minimums, minimum_factors: like scales and factors; None = there are no minimums.
    """

    code_bits: int
    scales: NDArray[np.float16]
    factors: NDArray[np.uint8] | NDArray[np.int8]
    minimums: NDArray[np.float16] | None = None
    minimum_factors: NDArray[np.uint8] | None = None

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Return all arrays: scales and factors, then minimums and their factors if there are any."""
        found = (self.scales, self.factors, self.minimums, self.minimum_factors)
        return tuple(array for array in found if array is not None)

    def map_arrays(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> "SuperBlocks":
        """Return a copy with `change` applied to every array."""
        return SuperBlocks(self.code_bits, *map(change, self.arrays))

    def reorder_runs(self, run_order: NDArray[np.int64]) -> "SuperBlocks | None":
        """Return a copy with runs of 32 columns reordered; None if the order does not keep halves of super-blocks together.

        Args:
            run_order: [K / 32] for each run of the result the index of the run in this matrix.
        """
        if columns_per_float16_scale(run_order) is None:
            return None
        halves = run_order[::_HALF_SUPER_BLOCK_RUNS] // _HALF_SUPER_BLOCK_RUNS
        repeated = len(halves) // self.scales.shape[1]
        return self.map_arrays(
            lambda array: np.repeat(array, repeated, 1).take(halves, 1) if array.dtype == np.float16 else _reorder_runs(array, run_order)
        )


def columns_per_float16_scale(run_order: NDArray[np.int64] | None) -> int | None:
    """Return how many adjacent columns share a float16 scale after runs of 32 columns are reordered: 256 or 128; None = fewer."""
    if run_order is None:
        return SUPER_BLOCK_COLUMNS
    run_halves = run_order.reshape(-1, _HALF_SUPER_BLOCK_RUNS) if len(run_order) % (2 * _HALF_SUPER_BLOCK_RUNS) == 0 else None
    is_whole = run_halves is not None and not (run_halves[:, 0] % _HALF_SUPER_BLOCK_RUNS).any() and (np.diff(run_halves) == 1).all()
    return _HALF_SUPER_BLOCK_COLUMNS if is_whole else None


def super_blocks_nbytes(num_weights: int, code_bits: int, scale_columns: int, *, has_minimums: bool) -> int:
    """Return the size in bytes of a K-quant's matrix in the kernels' layout, in which `scale_columns` columns share a float16 scale."""
    bytes_per_float16, other_bytes = _SCALE_BYTES[code_bits, has_minimums]
    scale_bytes = bytes_per_float16 * (SUPER_BLOCK_COLUMNS // scale_columns) + other_bytes
    return num_weights // SUPER_BLOCK_COLUMNS * (SUPER_BLOCK_COLUMNS * code_bits // 8 + scale_bytes)


def _reorder_runs(array: NDArray[Any], run_order: NDArray[np.int64]) -> NDArray[Any]:
    return array.reshape(len(array), len(run_order), -1).take(run_order, 1).reshape(array.shape)


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """A matrix [N, K] of values `scale * (code - zero_point) + minimum`, where each operation is rounded to float32.

    With `code_values`, they are `scale * code_values[code]`.

    Attributes:
        codes: 8 bits: [N, K] int8, or uint8 if codes exceed 127. 4 bits: [N, K / 2] uint8, in the order of `pack_nibbles`.
        scales: [N, K / group_size] float32; group g has columns [g * group_size, (g + 1) * group_size).
        minimums: [N, K / group_size] float32, or None if all are 0.
        bits: number of bits of a code, 4 or 8.
        zero_point: integer that is subtracted from every code.
        code_values: [16] int8 values of 4-bit codes, only without minimums and zero point; None = the value of a code is the code.
        super_blocks: scales and minimums of a K-quant in a smaller form; None = not a K-quant, or `reorder_runs` split its super-blocks.
    """

    codes: NDArray[np.uint8] | NDArray[np.int8]
    scales: NDArray[np.float32]
    minimums: NDArray[np.float32] | None
    bits: int
    zero_point: int = 0
    code_values: NDArray[np.int8] | None = None
    super_blocks: SuperBlocks | None = None

    def __post_init__(self) -> None:
        """Refuse group sizes that the kernels do not support.

        Raises:
            ValueError: The group size is not a multiple of 16 or, with 4-bit codes, neither 16 nor a multiple of 32.
        """
        columns, groups = self.shape[1], self.scales.shape[1]
        is_whole = self.group_size % (16 if self.bits == 8 or self.group_size == 16 else RUN_COLUMNS) == 0
        if self.bits not in (4, 8) or columns % groups or not is_whole:
            raise ValueError(f"{columns} columns of {self.bits} bits in {groups} groups: a group has 16 or a multiple of 32 columns")

    @property
    def shape(self) -> tuple[int, int]:
        rows, row_bytes = self.codes.shape
        return rows, row_bytes * 8 // self.bits

    @property
    def group_size(self) -> int:
        """Return how many columns share a scale: a multiple of 16; for 4-bit codes 16 or a multiple of 32."""
        return int(self.shape[1] // self.scales.shape[1])

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        return (self.codes, self.scales) if self.minimums is None else (self.codes, self.scales, self.minimums)

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of the matrix in the kernels' layout."""
        if (blocks := self.super_blocks) is None:
            return sum(array.nbytes for array in self.arrays)
        rows, columns = self.shape
        return super_blocks_nbytes(
            rows * columns, blocks.code_bits, columns // blocks.scales.shape[1], has_minimums=blocks.minimums is not None
        )

    def take_rows(self, rows: NDArray[np.int64] | slice) -> "GroupedMatrix":
        """Return a matrix with only the selected rows: a view for a slice, otherwise a copy."""
        minimums = None if self.minimums is None else self.minimums[rows]
        blocks = None if self.super_blocks is None else self.super_blocks.map_arrays(lambda array: array[rows])
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], minimums=minimums, super_blocks=blocks)

    def reorder_runs(self, run_order: NDArray[np.int64]) -> "GroupedMatrix":
        """Return a copy with runs of 32 columns reordered. Groups must not be longer than a run.

        Args:
            run_order: [K / 32] for each run of the result the index of the run in this matrix.
        """
        codes, scales, *minimums = (_reorder_runs(array, run_order) for array in self.arrays)
        blocks = None if self.super_blocks is None else self.super_blocks.reorder_runs(run_order)
        return replace(self, codes=codes, scales=scales, minimums=minimums[0] if minimums else None, super_blocks=blocks)

    def values(self, rows: NDArray[np.int32] | slice = slice(None)) -> NDArray[np.float32]:
        """Return the values of the selected rows, [len(rows), K] float32."""
        codes = unpack_nibbles(self.codes[rows].view(np.uint8)) if self.bits == 4 else self.codes[rows]
        scales = self.scales[rows]
        values = (codes if self.code_values is None else self.code_values[codes]).astype(np.float32).reshape(*scales.shape, self.group_size)
        if self.code_values is None and self.zero_point:
            values -= np.float32(self.zero_point)  # exact, because codes and zero point are small integers
        values *= scales[..., None]
        if self.minimums is not None:
            values += self.minimums[rows][..., None]
        return values.reshape(codes.shape)


def convert_in_chunks(convert: Callable[[slice], None], num_rows: int, chunk_rows: int, num_threads: int) -> None:
    """Call `convert` for consecutive ranges of rows, in several threads, so that temporary arrays stay small."""
    chunks = [slice(start, min(start + chunk_rows, num_rows)) for start in range(0, num_rows, chunk_rows)]
    if num_threads <= 1 or len(chunks) == 1:
        for chunk in chunks:
            convert(chunk)
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(convert, chunks))


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack [N, K] codes of 0 to 15 into [N, K / 2] bytes, in the order that `RUN_COLUMNS` describes. K is a multiple of 32."""
    runs = codes.reshape(len(codes), -1, 2, RUN_COLUMNS // 2)
    packed: NDArray[np.uint8] = runs[:, :, 0] | (runs[:, :, 1] << np.uint8(4))
    return packed.reshape(len(codes), codes.shape[1] // 2)


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack [N, K / 2] bytes to [N, K] codes, the inverse of `pack_nibbles`."""
    halves = packed.reshape(len(packed), packed.shape[1] * 2 // RUN_COLUMNS, 1, RUN_COLUMNS // 2)
    return np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=2).reshape(len(packed), packed.shape[1] * 2)


def pack_pairs_in_runs(pairs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Convert 4-bit codes from two adjacent columns to a byte, the first in the low 4 bits, to the order of `pack_nibbles`."""
    blocks = pairs.reshape(len(pairs), -1, RUN_COLUMNS // 2)
    first_16, last_16 = blocks[..., : RUN_COLUMNS // 4], blocks[..., RUN_COLUMNS // 4 :]
    packed = np.empty(blocks.shape, np.uint8)
    packed[..., 0::2] = (first_16 & np.uint8(15)) | (last_16 << np.uint8(4))
    packed[..., 1::2] = (first_16 >> np.uint8(4)) | (last_16 & np.uint8(240))
    return packed.reshape(len(pairs), -1)


def halved_e8m0_scales(exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the scales 2^(exponent - 127), halved because the values in `DOUBLED_E2M1_VALUES` are doubled. The exponent 255 means NaN."""
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128).astype(np.float32)
    return np.where(exponents == 255, np.float32(np.nan), scales)
