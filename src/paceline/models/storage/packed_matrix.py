"""Quantised matrices that a checkpoint stores in several tensors: codes, scales, zero points. They are read a few rows at a time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.grouped import GroupedMatrix, convert_in_chunks

_CHUNK_ITEMS = 1 << 20  # number of elements read at a time: few enough for small temporary arrays, enough for whole cache lines

Rows = slice | NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantised matrix [N, K] in a checkpoint.

    Attributes:
        where: path and tensor name, for errors.
        shape: (N, K).
        bits: number of bits of a code after conversion to `GroupedMatrix`, 4 or 8; None = it is converted to floats instead, because
            `GroupedMatrix` cannot hold its values.
        row_bytes: bytes of a row of the `GroupedMatrix`; 0 if it is converted to floats.
        arrays: stored arrays and settings that determine the values, to compute a digest from.
        read: function that returns stored rows as `GroupedMatrix`, or as float32 values [rows, K].
        row_indices: [N] index of the stored row for each row; None = all stored rows in order.
    """

    where: str
    shape: tuple[int, int]
    bits: int | None
    row_bytes: int
    arrays: tuple[NDArray[Any], ...]
    read: Callable[[Rows], GroupedMatrix | Floats]
    row_indices: NDArray[np.int64] | None = None

    def select_rows(self, rows: Rows) -> "PackedMatrix":
        """Return a matrix with only the selected rows, without reading them."""
        row_indices = np.arange(self.shape[0])[rows] if self.row_indices is None else self.row_indices[rows]
        return replace(self, shape=(len(row_indices), self.shape[1]), row_indices=row_indices)

    @property
    def source_arrays(self) -> tuple[NDArray[Any], ...]:
        """Return all arrays that determine the values, the row indices included."""
        return self.arrays if self.row_indices is None else (*self.arrays, self.row_indices[None])

    @property
    def _chunk_rows(self) -> int:
        return max(1, _CHUNK_ITEMS // self.shape[1] // 16 * 16)

    def to_grouped_matrix(self, num_threads: int = 1) -> GroupedMatrix:
        """Return the whole matrix as `GroupedMatrix`.

        Raises:
            CheckpointError: A scale is not finite.
        """
        first = self._read_chunk(slice(0, 1))
        assert isinstance(first, GroupedMatrix)
        arrays = tuple(np.empty((self.shape[0], part.shape[1]), part.dtype) for part in first.arrays)

        def convert_rows(rows: slice) -> None:
            chunk = self._read_chunk(rows)
            assert isinstance(chunk, GroupedMatrix)
            for stored, part in zip(arrays, chunk.arrays, strict=True):
                stored[rows] = part

        convert_in_chunks(convert_rows, self.shape[0], self._chunk_rows, num_threads)
        return replace(first, codes=arrays[0], scales=arrays[1], minimums=arrays[2] if len(arrays) > 2 else None)

    def to_array(self, round_values: Callable[[Floats], NDArray[Any]], num_threads: int = 1) -> NDArray[Any]:
        """Return the whole matrix, with `round_values` applied to its float32 values.

        Raises:
            CheckpointError: A value is not finite.
        """
        found = np.empty(self.shape, round_values(np.zeros((1, 1), np.float32)).dtype)

        def convert_rows(rows: slice) -> None:
            found[rows] = rounded = round_values(self.exact_values(rows))
            if rounded.dtype == np.float16 and not np.isfinite(rounded).all():
                raise CheckpointError(f"{self.where} has values that float16 does not reach: set dtype in config.json to float32")

        convert_in_chunks(convert_rows, self.shape[0], self._chunk_rows, num_threads)
        return found

    def exact_values(self, rows: Rows) -> Floats:
        """Return the values of the selected rows, without rounding."""
        chunk = self._read_chunk(rows)
        return chunk.values() if isinstance(chunk, GroupedMatrix) else chunk

    def _read_chunk(self, rows: Rows) -> GroupedMatrix | Floats:
        with np.errstate(invalid="ignore", over="ignore"):  # values are checked to be finite below
            chunk = self.read(rows if self.row_indices is None else self.row_indices[rows])
        numbers = chunk.arrays[1:] if isinstance(chunk, GroupedMatrix) else (chunk,)
        if not all(np.isfinite(part).all() for part in numbers):
            raise CheckpointError(f"{self.where} has a scale or a value that is not finite; the file is damaged, download it again")
        return chunk
