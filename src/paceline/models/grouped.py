"""Weight matrices stored as small integer codes in groups that share a scale: what in-situ quantisation writes and GGUF blocks are."""

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
"""Of an output's super-block by bits of a code and whether there are minimums: for each part that shares float16 numbers, and the rest."""


@dataclass(frozen=True, slots=True)
class SuperBlocks:
    """What a K-quant's scales and minimums are products of: `scales * factors` and `-(minimums * minimum_factors)`, exact in float32.

    Attributes:
        code_bits: 2 to 6, of codes that are stored in 4 or 8 as well.
        scales: [N, K / block] float16, a block of 256 columns or 128.
        factors: [N, K / group], 4 or 6 bits of a uint8; int8 where there are no minimums.
        minimums, minimum_factors: likewise, or None.
    """

    code_bits: int
    scales: NDArray[np.float16]
    factors: NDArray[np.uint8] | NDArray[np.int8]
    minimums: NDArray[np.float16] | None = None
    minimum_factors: NDArray[np.uint8] | None = None

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Scales and factors, then those of minimums where there are any."""
        found = (self.scales, self.factors, self.minimums, self.minimum_factors)
        return tuple(array for array in found if array is not None)

    def of(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> "SuperBlocks":
        """With every array changed."""
        return SuperBlocks(self.code_bits, *map(change, self.arrays))

    def with_runs(self, runs: NDArray[np.int64]) -> "SuperBlocks | None":
        """With runs of 32 columns in another order; None where halves of super-blocks are torn apart.

        Args:
            runs: [K / 32] which of the runs each is.
        """
        if block_of(runs) is None:
            return None
        halves = runs[:: _HALF // RUN] // (_HALF // RUN)
        repeated = len(halves) // self.scales.shape[1]
        return self.of(lambda array: np.repeat(array, repeated, 1).take(halves, 1) if array.dtype == np.float16 else take_runs(array, runs))


def block_of(runs: NDArray[np.int64] | None) -> int | None:
    """Columns that share float16 numbers once runs of 32 have been put in another order (None = in none): 256, 128, or None = fewer."""
    if runs is None:
        return SUPER_BLOCK
    of_half = runs.reshape(-1, _HALF // RUN) if len(runs) % (SUPER_BLOCK // RUN) == 0 else None
    is_whole = of_half is not None and not (of_half[:, 0] % (_HALF // RUN)).any() and (np.diff(of_half) == 1).all()
    return _HALF if is_whole else None


def super_blocks_size(num_items: int, code_bits: int, block: int, *, has_minimums: bool) -> int:
    """Bytes that the kernels keep of so many weights (kernels/super_blocks.c, small_blocks.c)."""
    of_halves, others = _NUMBERS_BYTES[code_bits, has_minimums]
    numbers = of_halves * (SUPER_BLOCK // block) + others
    return num_items // SUPER_BLOCK * (SUPER_BLOCK * code_bits // 8 + numbers)


def take_runs(array: NDArray[Any], runs: NDArray[np.int64]) -> NDArray[Any]:
    """What belongs to runs of columns in another order."""
    return array.reshape(len(array), len(runs), -1).take(runs, 1).reshape(array.shape)


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """A matrix [N, K] of values `scale * (code - zero_point) + minimum`, each operation rounded to float32 on its own.

    With a table a value is `scale * table[code]`.

    Attributes:
        codes: 8 bits: [N, K] int8, or uint8 where codes go past 127. 4 bits: [N, K / 2] uint8, packed in runs of 32.
        scales: [N, K / group] float32; group g covers columns [g * group, (g + 1) * group).
        minimums: [N, K / group] float32, or None where all are zero (then nothing is added).
        bits: 4 or 8.
        zero_point: subtracted from every code, in integers.
        table: [16] int8 for codes of 4 bits without minimums and zero point; None = codes are numbers.
        super_blocks: what scales and minimums are products of, where that is known: it takes less room.
    """

    codes: NDArray[np.uint8] | NDArray[np.int8]
    scales: NDArray[np.float32]
    minimums: NDArray[np.float32] | None
    bits: int
    zero_point: int = 0
    table: NDArray[np.int8] | None = None
    super_blocks: SuperBlocks | None = None

    def __post_init__(self) -> None:
        """Refuse what the kernels would read wrongly.

        Raises:
            ValueError: a group is no multiple of 16 columns, or one of 4 bits neither a half nor whole runs.
        """
        columns, groups = self.shape[1], self.scales.shape[1]
        is_whole = self.group % (16 if self.bits == 8 or self.group == 16 else RUN) == 0
        if self.bits not in (4, 8) or columns % groups or not is_whole:
            raise ValueError(f"{columns} columns of {self.bits} bits in {groups} groups: a group has 16 or a multiple of 32 columns")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, stored = self.codes.shape
        return rows, stored * 8 // self.bits

    @property
    def group(self) -> int:
        """Columns that share a scale: a multiple of 16; of 4-bit codes 16 or a multiple of 32."""
        return int(self.shape[1] // self.scales.shape[1])

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Codes, scales, and minimums where there are any."""
        return (self.codes, self.scales) if self.minimums is None else (self.codes, self.scales, self.minimums)

    @property
    def nbytes(self) -> int:
        """Bytes that the kernels keep of it."""
        if (own := self.super_blocks) is None:
            return sum(array.nbytes for array in self.arrays)
        rows, columns = self.shape
        return super_blocks_size(rows * columns, own.code_bits, columns // own.scales.shape[1], has_minimums=own.minimums is not None)

    def some_rows(self, rows: NDArray[np.int64] | slice) -> "GroupedMatrix":
        """The matrix of some rows: of a slice a view, else a copy."""
        minimums = None if self.minimums is None else self.minimums[rows]
        blocks = None if self.super_blocks is None else self.super_blocks.of(lambda array: array[rows])
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], minimums=minimums, super_blocks=blocks)

    def with_runs(self, runs: NDArray[np.int64]) -> "GroupedMatrix":
        """With runs of 32 columns in another order, for groups no longer than a run.

        Args:
            runs: [K / 32] which of the runs each is.
        """
        codes, scales, *minimums = (take_runs(array, runs) for array in self.arrays)
        blocks = None if self.super_blocks is None else self.super_blocks.with_runs(runs)
        return replace(self, codes=codes, scales=scales, minimums=minimums[0] if minimums else None, super_blocks=blocks)

    def values(self, rows: NDArray[np.int32] | slice = slice(None)) -> NDArray[np.float32]:
        """The exact values of `rows`, [len(rows), K] float32."""
        codes = unpack_nibbles(self.codes[rows].view(np.uint8)) if self.bits == 4 else self.codes[rows]
        scales = self.scales[rows]
        values = (codes if self.table is None else self.table[codes]).astype(np.float32).reshape(*scales.shape, self.group)
        if self.table is None and self.zero_point:
            values -= np.float32(self.zero_point)  # exact, as both are whole numbers
        values *= scales[..., None]
        if self.minimums is not None:
            values += self.minimums[rows][..., None]
        return values.reshape(codes.shape)


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[N, K] codes of 0 to 15, K a multiple of 32, as [N, K / 2] bytes in runs of 32."""
    runs = codes.reshape(len(codes), -1, 2, RUN // 2)
    packed: NDArray[np.uint8] = runs[:, :, 0] | (runs[:, :, 1] << np.uint8(4))
    return packed.reshape(len(codes), codes.shape[1] // 2)


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The inverse of `pack_nibbles`: [N, K / 2] bytes to [N, K] codes."""
    halves = packed.reshape(len(packed), packed.shape[1] * 2 // RUN, 1, RUN // 2)
    return np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=2).reshape(len(packed), packed.shape[1] * 2)


def runs_of_pairs(pairs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[N, K / 2] bytes that hold neighbours, the first in the low half, in runs of 32."""
    blocks = pairs.reshape(len(pairs), -1, RUN // 2)
    front, back = blocks[..., : RUN // 4], blocks[..., RUN // 4 :]  # bytes of columns 0 to 15 and 16 to 31
    packed = np.empty(blocks.shape, np.uint8)
    packed[..., 0::2] = (front & np.uint8(15)) | (back << np.uint8(4))
    packed[..., 1::2] = (front >> np.uint8(4)) | (back & np.uint8(240))
    return packed.reshape(len(pairs), -1)
