"""Weights in floats of 8 or 4 bits, with scales for rows, blocks or groups."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.containers.affine import unpack_codes
from paceline.models.containers.module import PackedModule
from paceline.models.grouped import RUN, GroupedMatrix, pack_pairs_in_runs
from paceline.models.mxfp4 import DOUBLED_E2M1_VALUES, half_scales
from paceline.models.storage.packed_matrix import Floats, PackedMatrix, Rows


def _e4m3_values() -> Floats:
    """Return the 256 values of E4M3: one sign bit, four exponent bits with bias 7, three mantissa bits. 0x7F and 0xFF are NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    sizes = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    sizes[(code & 127) == 127] = np.nan
    return np.where(code < 128, sizes, -sizes).astype(np.float32)


E4M3 = _e4m3_values()
"""Values of E4M3 by their bits (OCP 8-bit floating point, revision 1.0)."""


def read_e4m3(module: PackedModule, scales: Floats, block: tuple[int, int] | None) -> PackedMatrix:
    """Return the FP8 matrix `module.weight` times its scales: one for the matrix, for each row, or for each block.

    Args:
        scales: of any shape with the right number of elements.
        block: number of rows and columns that share a scale; None = no blocks.

    Raises:
        CheckpointError: The weight is missing or of another type, or the number of scales is wrong.
    """
    where, codes = module.describe_tensor("weight"), module.read_tensor("weight", "F8_E4M3")
    outputs, columns = codes.shape
    scale_rows, scale_columns = _scale_indices(scales, codes.shape, block, where)
    grid = np.ascontiguousarray(scales).reshape(-1, scale_columns.max(initial=0) + 1)

    def read_rows(rows: Rows) -> Floats:
        row_scales = grid[scale_rows[rows]]
        found: Floats = E4M3[codes[rows]] * (row_scales if row_scales.shape[1] == 1 else row_scales[:, scale_columns])
        return found

    return PackedMatrix(where, (outputs, columns), None, 0, (codes, grid), read_rows)


def scales_to_float32(array: NDArray[Any], type_name: str | None) -> Floats:
    """Return scales as float32. E8M0, also stored as U8, is the exponent of a power of two."""
    found: Floats = half_scales(array) * np.float32(2) if type_name in ("F8_E8M0", "U8") else np.asarray(array, np.float32)
    return found


def _scale_indices(
    scales: Floats, shape: tuple[int, ...], block: tuple[int, int] | None, where: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each row and each column of a matrix the index of its scale in the 2D array of scales."""
    outputs, columns = shape
    if scales.size == 1:
        return np.zeros(outputs, np.int64), np.zeros(columns, np.int64)
    if scales.shape in ((outputs,), (outputs, 1)):
        return np.arange(outputs), np.zeros(columns, np.int64)
    if block is None or scales.shape != (-(-outputs // block[0]), -(-columns // block[1])):
        blocks = "" if block is None else f" in blocks of {block[0]} x {block[1]}"
        raise CheckpointError(
            f"{where} of shape {list(shape)} has scales of shape {list(scales.shape)}, expected one, one a row or one a block{blocks}; "
            "config.json may belong to another model; otherwise download the model again"
        )
    return np.arange(outputs) // block[0], np.arange(columns) // block[1]


def read_e2m1(
    where: str, pairs: NDArray[np.uint8], scales: NDArray[Any], half_scales: Callable[[NDArray[Any]], Floats], factor: float = 1.0
) -> PackedMatrix:
    """Return an FP4 (E2M1) matrix in groups of 16 or 32 columns.

    Args:
        pairs: [N, K / 2], two codes in a byte, the first in the low half.
        scales: [N, groups], as stored.
        half_scales: returns half of stored scales as float32, because the table of code values is doubled to be integers.
        factor: number by which `half_scales` multiplies or divides, for the digest of the values.

    Raises:
        CheckpointError: The number of scales is wrong.
    """
    outputs, columns = pairs.shape[0], 2 * pairs.shape[1]
    num_groups = scales.shape[1] if scales.ndim == 2 else 0
    group_size = columns // num_groups if num_groups and columns % num_groups == 0 else 0
    if group_size not in (16, 32) or len(scales) != outputs:
        raise CheckpointError(
            f"{where} of shape {list(pairs.shape)} has scales of shape {list(scales.shape)}, expected one for 16 or 32 of "
            f"{columns} columns; download the model again"
        )

    arrays = (pairs, scales, np.array([[factor]]))

    def read_groups(rows: Rows) -> GroupedMatrix:
        return GroupedMatrix(pack_pairs_in_runs(pairs[rows]), half_scales(scales[rows]), None, 4, table=DOUBLED_E2M1_VALUES)

    def read_values(rows: Rows) -> Floats:
        codes = unpack_codes(pairs[rows], 4, columns)
        return DOUBLED_E2M1_VALUES[codes].astype(np.float32) * np.repeat(half_scales(scales[rows]), group_size, 1)

    if columns % RUN:
        return PackedMatrix(where, (outputs, columns), None, 0, arrays, read_values)
    return PackedMatrix(where, (outputs, columns), 4, columns // 2 + 4 * num_groups, arrays, read_groups)
