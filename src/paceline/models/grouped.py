"""Weight matrices as integer codes with a scale for each group of columns: the form of requantised and of GGUF matrices."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

RUN = 32
"""4-bit codes are packed in runs of 32: byte j of a run's 16 bytes holds element j in its low and element j + 16 in its high half."""
SUPER_BLOCK = 256
"""Columns of a K-quant's super-block."""
_HALF = 128
_NUMBERS_BYTES = {(2, True): (4, 16), (3, False): (0, 16), (4, False): (4, 4), (4, True): (4, 12), (5, True): (4, 12), (6, False): (0, 20)}
"""Bytes of a super-block's row, by bits of a code and whether there are minimums: for each part with its own float16, and the rest."""


@dataclass(frozen=True, slots=True)
class SuperBlocks:
    """The factors of a K-quant's scales and minimums, whose products are exact in float32.

    scale = scales * factors, minimum = -(minimums * minimum_factors).

    Attributes:
        code_bits: 2 to 6, also if the codes are stored in 4 or 8.
        scales: [N, K / block] float16; a block has 256 or 128 columns.
        factors: [N, K / group_size] uint8 of 4 or 6 bits; int8 if there are no minimums.
        minimums, minimum_factors: like scales and factors, or None.
    """

    code_bits: int
    scales: NDArray[np.float16]
    factors: NDArray[np.uint8] | NDArray[np.int8]
    minimums: NDArray[np.float16] | None = None
    minimum_factors: NDArray[np.uint8] | None = None

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Return scales and factors, then those of minimums if there are any."""
        found = (self.scales, self.factors, self.minimums, self.minimum_factors)
        return tuple(array for array in found if array is not None)

    def of(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> "SuperBlocks":
        """Return these factors with `change` applied to every array."""
        return SuperBlocks(self.code_bits, *map(change, self.arrays))

    def reorder_runs(self, runs: NDArray[np.int64]) -> "SuperBlocks | None":
        """Reorder runs of 32 columns; None if the order breaks halves of super-blocks.

        Args:
            runs: [K / 32] old index of each run.
        """
        if columns_per_float16_scale(runs) is None:
            return None
        halves = runs[:: _HALF // RUN] // (_HALF // RUN)
        repeated = len(halves) // self.scales.shape[1]
        return self.of(lambda array: np.repeat(array, repeated, 1).take(halves, 1) if array.dtype == np.float16 else take_runs(array, runs))


def columns_per_float16_scale(runs: NDArray[np.int64] | None) -> int | None:
    """Return how many columns still share one float16 scale after runs of 32 are reordered: 256, 128, or None if fewer."""
    if runs is None:
        return SUPER_BLOCK
    of_half = runs.reshape(-1, _HALF // RUN) if len(runs) % (SUPER_BLOCK // RUN) == 0 else None
    is_whole = of_half is not None and not (of_half[:, 0] % (_HALF // RUN)).any() and (np.diff(of_half) == 1).all()
    return _HALF if is_whole else None


def super_blocks_size(num_items: int, code_bits: int, block: int, *, has_minimums: bool) -> int:
    """Return the bytes of a matrix in the kernels' layout (kernels/super_blocks.c, low_bit_blocks.c)."""
    of_halves, others = _NUMBERS_BYTES[code_bits, has_minimums]
    numbers = of_halves * (SUPER_BLOCK // block) + others
    return num_items // SUPER_BLOCK * (SUPER_BLOCK * code_bits // 8 + numbers)


def take_runs(array: NDArray[Any], runs: NDArray[np.int64]) -> NDArray[Any]:
    """Reorder codes, scales or minimums by runs of 32 columns."""
    return array.reshape(len(array), len(runs), -1).take(runs, 1).reshape(array.shape)


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """A matrix [N, K] of values `scale * (code - zero_point) + minimum`, each operation rounded to float32.

    With a table, a value is `scale * table[code]`.

    Attributes:
        codes: 8 bits: [N, K] int8, or uint8 if codes exceed 127. 4 bits: [N, K / 2] uint8, packed in runs of 32.
        scales: [N, K / group_size] float32; group g has columns [g * group_size, (g + 1) * group_size).
        minimums: [N, K / group_size] float32, or None if all are 0.
        bits: 4 or 8.
        zero_point: subtracted from every code, in integers.
        table: [16] int8 for 4-bit codes without minimums and zero point; None = codes are numbers.
        super_blocks: the factors of scales and minimums, which take less memory; None = unknown.
    """

    codes: NDArray[np.uint8] | NDArray[np.int8]
    scales: NDArray[np.float32]
    minimums: NDArray[np.float32] | None
    bits: int
    zero_point: int = 0
    table: NDArray[np.int8] | None = None
    super_blocks: SuperBlocks | None = None

    def __post_init__(self) -> None:
        """Refuse what the kernels cannot read.

        Raises:
            ValueError: A group is no multiple of 16 columns, or of 4-bit codes neither 16 nor a multiple of 32.
        """
        columns, groups = self.shape[1], self.scales.shape[1]
        is_whole = self.group_size % (16 if self.bits == 8 or self.group_size == 16 else RUN) == 0
        if self.bits not in (4, 8) or columns % groups or not is_whole:
            raise ValueError(f"{columns} columns of {self.bits} bits in {groups} groups: a group has 16 or a multiple of 32 columns")

    @property
    def shape(self) -> tuple[int, int]:
        """Return (N, K)."""
        rows, stored = self.codes.shape
        return rows, stored * 8 // self.bits

    @property
    def group_size(self) -> int:
        """Return the columns that share a scale: a multiple of 16; for 4-bit codes 16 or a multiple of 32."""
        return int(self.shape[1] // self.scales.shape[1])

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Return codes, scales, and minimums if there are any."""
        return (self.codes, self.scales) if self.minimums is None else (self.codes, self.scales, self.minimums)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the matrix in the kernels' layout."""
        if (own := self.super_blocks) is None:
            return sum(array.nbytes for array in self.arrays)
        rows, columns = self.shape
        return super_blocks_size(rows * columns, own.code_bits, columns // own.scales.shape[1], has_minimums=own.minimums is not None)

    def take_rows(self, rows: NDArray[np.int64] | slice) -> "GroupedMatrix":
        """Return the matrix of some rows: a view for a slice, otherwise a copy."""
        minimums = None if self.minimums is None else self.minimums[rows]
        blocks = None if self.super_blocks is None else self.super_blocks.of(lambda array: array[rows])
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], minimums=minimums, super_blocks=blocks)

    def reorder_runs(self, runs: NDArray[np.int64]) -> "GroupedMatrix":
        """Reorder runs of 32 columns; groups must not be longer than a run.

        Args:
            runs: [K / 32] old index of each run.
        """
        codes, scales, *minimums = (take_runs(array, runs) for array in self.arrays)
        blocks = None if self.super_blocks is None else self.super_blocks.reorder_runs(runs)
        return replace(self, codes=codes, scales=scales, minimums=minimums[0] if minimums else None, super_blocks=blocks)

    def values(self, rows: NDArray[np.int32] | slice = slice(None)) -> NDArray[np.float32]:
        """Return the exact values of `rows`, [len(rows), K] float32."""
        codes = unpack_nibbles(self.codes[rows].view(np.uint8)) if self.bits == 4 else self.codes[rows]
        scales = self.scales[rows]
        values = (codes if self.table is None else self.table[codes]).astype(np.float32).reshape(*scales.shape, self.group_size)
        if self.table is None and self.zero_point:
            values -= np.float32(self.zero_point)  # exact, because both are integers
        values *= scales[..., None]
        if self.minimums is not None:
            values += self.minimums[rows][..., None]
        return values.reshape(codes.shape)


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack [N, K] codes of 0 to 15 into [N, K / 2] bytes, in runs of 32. K is a multiple of 32."""
    runs = codes.reshape(len(codes), -1, 2, RUN // 2)
    packed: NDArray[np.uint8] = runs[:, :, 0] | (runs[:, :, 1] << np.uint8(4))
    return packed.reshape(len(codes), codes.shape[1] // 2)


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack [N, K / 2] bytes to [N, K] codes, the inverse of `pack_nibbles`."""
    halves = packed.reshape(len(packed), packed.shape[1] * 2 // RUN, 1, RUN // 2)
    return np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=2).reshape(len(packed), packed.shape[1] * 2)


def runs_of_pairs(pairs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Repack [N, K / 2] bytes of two neighbours, the first in the low half, into runs of 32."""
    blocks = pairs.reshape(len(pairs), -1, RUN // 2)
    front, back = blocks[..., : RUN // 4], blocks[..., RUN // 4 :]  # the bytes of columns 0 to 15 and of columns 16 to 31
    packed = np.empty(blocks.shape, np.uint8)
    packed[..., 0::2] = (front & np.uint8(15)) | (back << np.uint8(4))
    packed[..., 1::2] = (front >> np.uint8(4)) | (back & np.uint8(240))
    return packed.reshape(len(pairs), -1)
