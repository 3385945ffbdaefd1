"""Quantise float matrices to 4- or 8-bit codes at load, with one scale for each group of columns.

Scales are rounded to 12 significant bits. So `scale * code` is exact in float32, and every runtime computes with the same values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import QuantOptions
from paceline.errors import CheckpointError, ConfigError
from paceline.models.grouped import GroupedMatrix, convert_in_chunks, pack_nibbles
from paceline.models.weights import AnyTensor, GroupedTensor, TensorInfo, Weights, as_float32

FloatArray = NDArray[np.float32]
GROUP_SIZES = (128, 64, 32)
_CHUNK_VALUES = 1 << 17  # number of values quantised at a time, so that temporary arrays fit in the CPU cache
_SCALE_BITS_DROPPED = 12  # how many of the 24 significant bits of a float32 scale are rounded to 0
_MAX_WEIGHT = np.float32(1e37)  # larger weights are refused, so that `scale * code` stays finite; real weights are far smaller
# not quantised: small matrices that select experts, or clusters of tokens in a Gemma 4 assistant; rounding could change the selection
_UNQUANTIZED_NAMES = ("router", "shared_gate", "altup_router", "centroids")
_MIN_GROUP_MAGNITUDE = np.float32(1e-30)  # groups with only smaller values become zeros: their scale would be subnormal
# candidates for the code of a group's value of largest magnitude, before clipping to -8..7. Each gives a scale. Clipping often lowers the
# squared error; -7 clips nothing. A finer search would lower the error by another 0.3 % and take a third longer.
_INT4_EXTREME_CODES = (-8.0, -7.0, -8.6, -9.3)


def mean_weight_bits(weights: Weights, quantization: QuantOptions | None = None) -> float:
    """Return the average number of bits of a weight in matrices, scales included.

    Args:
        quantization: options with which the matrices will be quantised at load; None = they are used as stored.
    """
    if quantization is not None:
        return quantization.bits
    matrices = [info for info in map(weights.tensor_info, weights) if len(info.shape) > 1]
    return 8 * sum(info.nbytes for info in matrices) / max(1, sum(math.prod(info.shape) for info in matrices))


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """How one matrix is quantised: 8-bit codes are -127 to 127, 4-bit codes 0 to 15 with zero point 8.

    Attributes:
        group_size: number of columns that share a scale.
    """

    bits: int
    group_size: int

    @property
    def zero_point(self) -> int:
        return 8 if self.bits == 4 else 0

    @property
    def code_type(self) -> "np.dtype[Any]":
        return np.dtype(np.int8 if self.bits == 8 else np.uint8)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        values = math.prod(shape)
        return values * self.bits // 8 + values // self.group_size * 4


def quantize_matrix(values: FloatArray, *, bits: int, group_size: int, name: str = "the matrix") -> GroupedMatrix:
    """Quantise `values` [N, K]. Of several scales, each group gets the one with the smallest squared error; a group of zeros gets scale 1.

    Args:
        group_size: 32, 64 or 128, and a divisor of K.
        name: name of the matrix, for errors.

    Raises:
        CheckpointError: A value is NaN, infinite or beyond 1e37.
        ConfigError: The number of bits or the group size is not supported.
    """
    rows, columns = values.shape
    if bits not in (4, 8) or group_size not in GROUP_SIZES or columns % group_size:
        raise ConfigError(
            f"{name} of width {columns} fits no {bits}-bit groups of {group_size}: use 4 or 8 bits and groups of 32, 64 or 128 "
            "that divide it"
        )
    scheme = QuantizationScheme(bits, group_size)
    signed, scales = _quantize_groups(values.reshape(rows, columns // group_size, group_size), bits, name)
    codes = (signed + np.float32(scheme.zero_point)).astype(scheme.code_type).reshape(rows, columns)
    return GroupedMatrix(pack_nibbles(codes) if bits == 4 else codes, scales, None, bits, scheme.zero_point)


def quantization_scheme(name: str, info: TensorInfo, options: QuantOptions, *, is_also_lm_head: bool) -> QuantizationScheme | None:
    """Return how a tensor is quantised; None = not at all: it is no matrix, is excluded, has as few bits already, or fits no group size.

    Args:
        is_also_lm_head: embeddings are tied, so the embedding is also the output matrix.
    """
    if len(info.shape) != 2:
        return None
    bits = _quantized_bits(name, options, is_also_lm_head=is_also_lm_head)
    group_size = largest_group_size(info.shape[1], options.group)
    if bits is None or group_size is None or (info.bits is not None and info.bits <= bits):
        return None
    return QuantizationScheme(bits, group_size)


def quantization_schemes(weights: Weights, options: QuantOptions) -> dict[str, QuantizationScheme]:
    """Return the quantisation schemes of the tensors to quantise, by name, in the order of `weights`."""
    is_tied = not weights.has_tensor("lm_head.weight")
    found = {name: quantization_scheme(name, weights.tensor_info(name), options, is_also_lm_head=is_tied) for name in weights}
    return {name: scheme for name, scheme in found.items() if scheme is not None}


def largest_group_size(columns: int, max_size: int) -> int | None:
    """Return the largest supported group size up to `max_size` that divides `columns`; None if there is none."""
    return next((group_size for group_size in GROUP_SIZES if group_size <= max_size and columns % group_size == 0), None)


def quantize_tensor(name: str, tensor: AnyTensor, scheme: QuantizationScheme, *, num_threads: int = 1) -> GroupedTensor:
    """Quantise a tensor in several threads. Each takes chunks of rows, which limits the memory of temporary arrays.

    Raises:
        CheckpointError: A value is NaN, infinite or beyond 1e37.
    """
    rows, columns = tensor.shape
    codes = np.empty((rows, columns * scheme.bits // 8), scheme.code_type)
    scales = np.empty((rows, columns // scheme.group_size), np.float32)

    def quantize_rows(row_range: slice) -> None:
        chunk = quantize_matrix(as_float32(tensor, row_range), bits=scheme.bits, group_size=scheme.group_size, name=name)
        codes[row_range], scales[row_range] = chunk.codes, chunk.scales

    convert_in_chunks(quantize_rows, rows, max(1, _CHUNK_VALUES // columns), num_threads)
    return GroupedTensor(GroupedMatrix(codes, scales, None, scheme.bits, scheme.zero_point), tensor.weight_type)


def _quantized_bits(name: str, options: QuantOptions, *, is_also_lm_head: bool) -> int | None:
    for pattern, bits in options.overrides:
        if fnmatchcase(name, pattern):
            return bits
    if name.rsplit(".", 2)[-2] in _UNQUANTIZED_NAMES:
        return None
    if name == "embedding.weight" and is_also_lm_head:
        both = (options.embedding_bits, options.lm_head_bits)
        return None if None in both else max(bits for bits in both if bits is not None)
    tables = dict.fromkeys(("embedding.weight", "layer_embedding.weight"), options.embedding_bits)
    return {**tables, "lm_head.weight": options.lm_head_bits}.get(name, options.bits)


def _quantize_groups(groups: FloatArray, bits: int, name: str) -> tuple[FloatArray, FloatArray]:
    """Return signed codes [N, num_groups, group_size] and scales [N, num_groups]. 4-bit scales may be negative."""
    low, high = groups.min(axis=2), groups.max(axis=2)
    _check_range(low, high, name)
    # The sign of a 4-bit scale makes the code of the value with the largest magnitude negative, because codes are -8 to 7.
    extremes = np.where(-low > high, low, high) if bits == 4 else np.maximum(-low, high)
    extreme_codes, bounds = (_INT4_EXTREME_CODES, (-8.0, 7.0)) if bits == 4 else ((127.0,), (-127.0, 127.0))
    return _choose_scales(groups, extremes, extreme_codes, bounds)


def _choose_scales(
    groups: FloatArray, extremes: FloatArray, extreme_codes: Sequence[float], bounds: tuple[float, float]
) -> tuple[FloatArray, FloatArray]:
    """Return codes and scales. Codes are round(value / extreme * extreme_code) with the extreme code that has the smallest squared error.

    Args:
        extremes: value of largest magnitude in each group.
        extreme_codes: candidates for the code of that value, before codes are clipped to `bounds`.
    """
    is_zero = np.abs(extremes) < _MIN_GROUP_MAGNITUDE
    inverse = np.where(is_zero, np.float32(0), np.float32(1) / np.where(is_zero, np.float32(1), extremes))
    normalized = groups * inverse[..., None]
    codes = np.empty_like(normalized)
    best = np.full(extremes.shape, -1, np.float32)
    best_code, scales = np.empty_like(best), np.empty_like(best)
    for extreme_code in extreme_codes:
        _round_to_codes(normalized, np.float32(extreme_code), bounds, codes)
        projection = np.einsum("ngk,ngk->ng", normalized, codes)
        squared = np.maximum(np.einsum("ngk,ngk->ng", codes, codes), np.float32(1))
        gain = projection * projection / squared  # decrease of the squared error compared with a scale of 0
        better = gain > best
        best = np.where(better, gain, best)
        best_code = np.where(better, np.float32(extreme_code), best_code)
        scales = np.where(better, projection / squared, scales)
    if len(extreme_codes) > 1:
        _round_to_codes(normalized, best_code[..., None], bounds, codes)
    scales = _round_scales(scales * extremes)
    is_zero = np.abs(scales) < _MIN_GROUP_MAGNITUDE
    codes[is_zero] = 0
    return codes, np.where(is_zero, np.float32(1), scales)


def _round_to_codes(normalized: FloatArray, extreme_code: FloatArray | np.float32, bounds: tuple[float, float], out: FloatArray) -> None:
    """Write integers in `bounds` to `out`, such that 1, the group's value of largest magnitude, becomes `extreme_code`."""
    np.multiply(normalized, extreme_code, out=out)
    np.rint(out, out=out)
    np.clip(out, *bounds, out=out)


def _round_scales(scales: FloatArray) -> FloatArray:
    """Round scales to 12 significant bits, with ties away from zero."""
    half = np.uint32(1 << (_SCALE_BITS_DROPPED - 1))
    bits = np.ascontiguousarray(scales, np.float32).view(np.uint32) + half
    return (bits & np.uint32(0xFFFFFFFF ^ ((1 << _SCALE_BITS_DROPPED) - 1))).view(np.float32)


def _check_range(low: FloatArray, high: FloatArray, name: str) -> None:
    if not ((low >= -_MAX_WEIGHT).all() and (high <= _MAX_WEIGHT).all()):  # comparisons with NaN are false
        raise CheckpointError(f"{name} holds weights that are NaN, infinite or beyond {_MAX_WEIGHT:.0e}: verify the checkpoint's files")
