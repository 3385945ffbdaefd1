"""Weight matrices stored as small integer codes in groups that share a scale: what in-situ quantisation writes and GGUF blocks are."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

RUN = 32
"""4-bit codes are packed in runs of 32: byte j of a run's 16 bytes holds element j in its low and element j + 16 in its high half."""


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
    """

    codes: NDArray[np.uint8] | NDArray[np.int8]
    scales: NDArray[np.float32]
    minimums: NDArray[np.float32] | None
    bits: int
    zero_point: int = 0
    table: NDArray[np.int8] | None = None

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
        return sum(array.nbytes for array in self.arrays)

    def first_rows(self, count: int) -> "GroupedMatrix":
        """The matrix of the first `count` rows: a view."""
        minimums = None if self.minimums is None else self.minimums[:count]
        return replace(self, codes=self.codes[:count], scales=self.scales[:count], minimums=minimums)

    def values(self, rows: NDArray[np.int32] | slice = slice(None)) -> NDArray[np.float32]:
        """The exact values of `rows`, [len(rows), K] float32."""
        codes = unpack_nibbles(self.codes[rows].view(np.uint8)) if self.bits == 4 else self.codes[rows]
        shifted = codes.astype(np.int32) - np.int32(self.zero_point) if self.table is None else self.table[codes]
        scales = self.scales[rows]
        values = shifted.astype(np.float32).reshape(*scales.shape, self.group) * scales[..., None]
        if self.minimums is not None:
            values += self.minimums[rows][..., None]
        return values.reshape(len(codes), self.shape[1])


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[N, K] codes of 0 to 15, K a multiple of 32, as [N, K / 2] bytes in runs of 32."""
    runs = codes.reshape(len(codes), -1, 2, RUN // 2)
    packed: NDArray[np.uint8] = runs[:, :, 0] | (runs[:, :, 1] << np.uint8(4))
    return packed.reshape(len(codes), codes.shape[1] // 2)


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The inverse of `pack_nibbles`: [N, K / 2] bytes to [N, K] codes."""
    halves = packed.reshape(len(packed), -1, 1, RUN // 2)
    return np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=2).reshape(len(packed), packed.shape[1] * 2)
