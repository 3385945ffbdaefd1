"""Quantised matrices that a checkpoint stores in several tensors, such as codes, scales and zero points."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.grouped import GroupedMatrix, convert_in_chunks

_WEIGHTS_PER_CHUNK = 1 << 20  # few, to keep temporary arrays small

RowSelection = slice | NDArray[np.int64]  # a range of matrix rows, or their indices
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantised matrix [N, K] in a checkpoint.

    Attributes:
        stored_name: path and tensor name, for errors.
        shape: (N, K).
        bits: number of bits of a code after conversion to `GroupedMatrix`, 4 or 8; None = the matrix is converted to floats, because
            `GroupedMatrix` cannot hold its values.
        row_bytes: bytes of a row of the `GroupedMatrix`; 0 if the matrix is converted to floats.
        stored_arrays: stored arrays and settings that together determine the values; a digest is computed from them.
        read_rows: function that returns stored rows as `GroupedMatrix`, or as float32 values [rows, K].
        row_indices: [N] for each row of the matrix the index of the stored row; None = all stored rows in order.
    """

    stored_name: str
    shape: tuple[int, int]
    bits: int | None
    row_bytes: int
    stored_arrays: tuple[NDArray[Any], ...]
    read_rows: Callable[[RowSelection], GroupedMatrix | Floats]
    row_indices: NDArray[np.int64] | None = None

    def select_rows(self, rows: RowSelection) -> "PackedMatrix":
        """Return a matrix with only the selected rows, without reading them."""
        row_indices = np.arange(self.shape[0])[rows] if self.row_indices is None else self.row_indices[rows]
        return replace(self, shape=(len(row_indices), self.shape[1]), row_indices=row_indices)

    @property
    def source_arrays(self) -> tuple[NDArray[Any], ...]:
        """Return `stored_arrays` and the row indices, which together determine the values."""
        return self.stored_arrays if self.row_indices is None else (*self.stored_arrays, self.row_indices[None])

    @property
    def _rows_per_chunk(self) -> int:
        return max(1, _WEIGHTS_PER_CHUNK // self.shape[1] // 16 * 16)

    def to_grouped_matrix(self, num_threads: int = 1) -> GroupedMatrix:
        """Return the whole matrix as `GroupedMatrix`.

        Raises:
            CheckpointError: A scale is not finite.
        """
        first = self._read_chunk(slice(0, 1))
        assert isinstance(first, GroupedMatrix)
        arrays = tuple(np.empty((self.shape[0], part.shape[1]), part.dtype) for part in first.arrays)

        def convert_row_range(row_range: slice) -> None:
            chunk = self._read_chunk(row_range)
            assert isinstance(chunk, GroupedMatrix)
            for stored, part in zip(arrays, chunk.arrays, strict=True):
                stored[row_range] = part

        convert_in_chunks(convert_row_range, self.shape[0], self._rows_per_chunk, num_threads)
        return replace(first, codes=arrays[0], scales=arrays[1], minimums=arrays[2] if len(arrays) > 2 else None)

    def to_array(self, round_values: Callable[[Floats], NDArray[Any]], num_threads: int = 1) -> NDArray[Any]:
        """Return the whole matrix, with `round_values` applied to its float32 values.

        Raises:
            CheckpointError: A value is not finite.
        """
        found = np.empty(self.shape, round_values(np.zeros((1, 1), np.float32)).dtype)

        def round_row_range(row_range: slice) -> None:
            found[row_range] = rounded = round_values(self.exact_values(row_range))
            if rounded.dtype == np.float16 and not np.isfinite(rounded).all():
                raise CheckpointError(f"{self.stored_name} has values outside the range of float16: set dtype in config.json to float32")

        convert_in_chunks(round_row_range, self.shape[0], self._rows_per_chunk, num_threads)
        return found

    def exact_values(self, rows: RowSelection) -> Floats:
        """Return the values of the selected rows, without rounding."""
        chunk = self._read_chunk(rows)
        return chunk.values() if isinstance(chunk, GroupedMatrix) else chunk

    def _read_chunk(self, rows: RowSelection) -> GroupedMatrix | Floats:
        with np.errstate(invalid="ignore", over="ignore"):  # values are checked below
            chunk = self.read_rows(rows if self.row_indices is None else self.row_indices[rows])
        numbers = chunk.arrays[1:] if isinstance(chunk, GroupedMatrix) else (chunk,)
        if not all(np.isfinite(part).all() for part in numbers):
            raise CheckpointError(f"{self.stored_name} has a scale or a value that is not finite; the file is damaged, download it again")
        return chunk
