"""Matrices in groups as compressed constants: the plugin multiplies with the codes instead of unpacking them first."""

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from paceline.models.grouped import GroupedMatrix, unpack_nibbles

_F32 = ov.Type.f32
_ROWS_AT_ONCE = 1 << 12


def is_compressible(matrix: GroupedMatrix) -> bool:
    """Whether the graph can compute the exact values: the plugin knows zero points, so minimums must be whole multiples of the scales."""
    return matrix.minimums is None or _zero_points(matrix) is not None


def compressed(matrix: GroupedMatrix, kept_alive: list[np.ndarray]) -> ov.Output:
    """The values [N, K] float32 as nodes: convert, subtract, multiply, reshape.

    Args:
        kept_alive: gets every array the constants share memory with.
    """
    rows, columns = matrix.shape
    groups = columns // matrix.group
    shape = ov.Shape([rows, groups, matrix.group])
    stored: NDArray[np.uint8] | NDArray[np.int8]
    if matrix.bits == 4:
        element_type, stored = ov.Type.u4, _in_order(matrix.codes.view(np.uint8))
    else:
        element_type, stored = ov.Type.i8 if matrix.codes.dtype == np.int8 else ov.Type.u8, matrix.codes
    kept_alive.append(stored)
    codes = ops.constant(ov.Tensor(stored.reshape(-1), shape, element_type))
    values = ops.convert(codes, _F32)
    zero_points = _zero_points(matrix)
    if zero_points is not None:
        values = ops.subtract(values, ops.convert(_zero_point_constant(zero_points, element_type, kept_alive), _F32))
    scales = np.ascontiguousarray(matrix.scales).reshape(rows, groups, 1)
    kept_alive.append(scales)
    values = ops.multiply(values, ops.constant(ov.Tensor(scales, shared_memory=True)))
    return ops.reshape(values, ops.constant(np.array([rows, columns], np.int64)), False).output(0)


def _zero_points(matrix: GroupedMatrix) -> NDArray[np.uint8] | None:
    """What to subtract from the codes, [1, 1, 1] or [N, G, 1]; None = nothing, or minimums that no zero point can stand for."""
    if matrix.minimums is None:
        return np.full((1, 1, 1), matrix.zero_point, np.uint8) if matrix.zero_point else None
    points = np.rint(-matrix.minimums / matrix.scales)
    is_exact = np.array_equal(-points * matrix.scales, matrix.minimums) and not matrix.zero_point
    highest = 127 if matrix.codes.dtype == np.int8 else 2**matrix.bits - 1
    if not is_exact or points.min() < 0 or points.max() > highest:
        return None
    zero_points: NDArray[np.uint8] = points.astype(np.uint8)[..., None]
    return zero_points


def _zero_point_constant(points: NDArray[np.uint8], element_type: ov.Type, kept_alive: list[np.ndarray]) -> ov.Node:
    if element_type != ov.Type.u4:
        kept_alive.append(points if element_type == ov.Type.u8 else points.astype(np.int8))
        return ops.constant(ov.Tensor(kept_alive[-1], shared_memory=True))
    flat = points.reshape(-1)
    flat = np.append(flat, np.uint8(0)) if len(flat) % 2 else flat
    kept_alive.append(flat[0::2] | (flat[1::2] << np.uint8(4)))
    return ops.constant(ov.Tensor(kept_alive[-1], ov.Shape(list(points.shape)), ov.Type.u4))


def _in_order(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """4-bit codes in runs of 32 as OpenVINO keeps them: two neighbours a byte, the first in the low half."""
    repacked = np.empty_like(packed)
    for start in range(0, len(packed), _ROWS_AT_ONCE):
        codes = unpack_nibbles(packed[start : start + _ROWS_AT_ONCE])
        repacked[start : start + _ROWS_AT_ONCE] = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
    return repacked
