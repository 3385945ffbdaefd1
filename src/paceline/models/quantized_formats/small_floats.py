"""Weights in 8-bit or 4-bit floats, with scales for rows, blocks or groups."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, shortened
from paceline.models.grouped import DOUBLED_E2M1_VALUES, RUN_COLUMNS, GroupedMatrix, halved_e8m0_scales, pack_pairs_in_runs
from paceline.models.quantized_formats.affine import Bytes, unpack_codes
from paceline.models.quantized_formats.module import PackedModule
from paceline.models.storage.packed_matrix import Floats, PackedMatrix, RowSelection


def _e4m3_values() -> Floats:
    """Return the 256 values of E4M3: one sign bit, four exponent bits with bias 7, three mantissa bits. 0x7F and 0xFF are NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    sizes = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    sizes[(code & 127) == 127] = np.nan
    return np.where(code < 128, sizes, -sizes).astype(np.float32)


E4M3_VALUES = _e4m3_values()
"""The values of all codes of E4M3 (OCP 8-bit floating point, revision 1.0)."""


def read_e4m3(module: PackedModule, scale_name: str, block_shape: tuple[int, int] | None = None) -> PackedMatrix:
    """Return the FP8 matrix `module.weight` times its scales: one for the matrix, for each row, or for each block.

    Args:
        scale_name: tensor with the scales. Scales of type E8M0, which some files declare as U8, are exponents of powers of two.
        block_shape: number of rows and columns that share a scale; None = no blocks.

    Raises:
        CheckpointError: A tensor is missing or of another type, or the number of scales is wrong.
    """
    if module.tensor_type(scale_name) in ("F8_E8M0", "U8"):
        scales: Floats = halved_e8m0_scales(module.read_tensor(scale_name, "F8_E8M0", "U8", ndim=None)) * np.float32(2)
    else:
        scales = np.asarray(module.read_floats(scale_name, ndim=None), np.float32)
    where, codes = module.describe_tensor("weight"), module.read_tensor("weight", "F8_E4M3")
    outputs, columns = codes.shape
    scale_rows, scale_columns = _scale_indices(scales, codes.shape, block_shape, where)
    grid = np.ascontiguousarray(scales).reshape(-1, scale_columns.max(initial=0) + 1)

    def read_rows(rows: RowSelection) -> Floats:
        row_scales = grid[scale_rows[rows]]
        values: Floats = E4M3_VALUES[codes[rows]] * (row_scales if row_scales.shape[1] == 1 else row_scales[:, scale_columns])
        return values

    return PackedMatrix(where, (outputs, columns), None, 0, (codes, grid), read_rows)


def _scale_indices(
    scales: Floats, shape: tuple[int, ...], block_shape: tuple[int, int] | None, where: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each row and each column of a matrix the index of its scale in the 2D array of scales."""
    outputs, columns = shape
    if scales.size == 1:
        return np.zeros(outputs, np.int64), np.zeros(columns, np.int64)
    if scales.shape in ((outputs,), (outputs, 1)):
        return np.arange(outputs), np.zeros(columns, np.int64)
    if block_shape is None or scales.shape != (-(-outputs // block_shape[0]), -(-columns // block_shape[1])):
        blocks = "" if block_shape is None else f" in blocks of {block_shape[0]} x {block_shape[1]}"
        raise CheckpointError(
            f"{where} of shape {list(shape)} has scales of shape {list(scales.shape)}, expected one, one a row or one a block{blocks}; "
            "config.json may belong to another model; otherwise download the model again"
        )
    return np.arange(outputs) // block_shape[0], np.arange(columns) // block_shape[1]


def read_nvfp4(module: PackedModule, codes_name: str, global_scale_name: str, *, is_divisor: bool) -> PackedMatrix:
    """Return an NVFP4 matrix. One global scale multiplies or divides the E4M3 scales of its groups.

    Raises:
        CheckpointError: A tensor is missing or of another type, or the global scale is implausible.
    """
    where, codes = module.describe_tensor(codes_name), module.read_tensor(codes_name, "U8")
    scales = module.read_tensor("weight_scale", "F8_E4M3")
    global_scale = module.read_floats(global_scale_name, ndim=None).astype(np.float32).reshape(-1)
    if global_scale.size != 1 or (is_divisor and not global_scale[0] > 1):  # the largest weight is 6 * 448 / global_scale
        expected = "one number above 1" if is_divisor else "one number"
        raise CheckpointError(f"{where}: {global_scale_name} = {shortened(global_scale.tolist())}, expected {expected}; download it again")

    def to_halved_scales(stored_scales: NDArray[np.uint8]) -> Floats:
        group_scales = E4M3_VALUES[stored_scales]
        values: Floats = (group_scales / global_scale[0] if is_divisor else group_scales * global_scale[0]) * np.float32(0.5)
        return values

    return read_e2m1(where, codes, scales, to_halved_scales, float(global_scale[0]))


def read_e2m1(
    where: str, codes: Bytes, scales: NDArray[Any], to_halved_scales: Callable[[NDArray[Any]], Floats], global_scale: float = 1.0
) -> PackedMatrix:
    """Return an FP4 (E2M1) matrix in groups of 16 or 32 columns.

    Args:
        codes: [N, K / 2], two codes in a byte, the first in the low half.
        scales: [N, groups], as stored.
        to_halved_scales: function that converts stored scales to float32 and halves them, because `DOUBLED_E2M1_VALUES` are doubled.
        global_scale: global scale that `to_halved_scales` applies, for the digest of the values.

    Raises:
        CheckpointError: The number of scales is wrong.
    """
    outputs, columns = codes.shape[0], 2 * codes.shape[1]
    num_groups = scales.shape[1] if scales.ndim == 2 else 0
    group_size = columns // num_groups if num_groups and columns % num_groups == 0 else 0
    if group_size not in (16, 32) or len(scales) != outputs:
        raise CheckpointError(
            f"{where} of shape {list(codes.shape)} has scales of shape {list(scales.shape)}, expected one for 16 or 32 of "
            f"{columns} columns; download the model again"
        )

    arrays = (codes, scales, np.array([[global_scale]]))

    def read_groups(rows: RowSelection) -> GroupedMatrix:
        return GroupedMatrix(pack_pairs_in_runs(codes[rows]), to_halved_scales(scales[rows]), None, 4, code_values=DOUBLED_E2M1_VALUES)

    def read_values(rows: RowSelection) -> Floats:
        unpacked = unpack_codes(codes[rows], 4, columns)
        return DOUBLED_E2M1_VALUES[unpacked].astype(np.float32) * np.repeat(to_halved_scales(scales[rows]), group_size, 1)

    if columns % RUN_COLUMNS:
        return PackedMatrix(where, (outputs, columns), None, 0, arrays, read_values)
    return PackedMatrix(where, (outputs, columns), 4, columns // 2 + 4 * num_groups, arrays, read_groups)
