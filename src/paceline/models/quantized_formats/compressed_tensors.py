"""compressed-tensors (llm-compressor): integers of 2 to 8 bits, FP8, NVFP4 and MXFP4."""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.grouped import halved_e8m0_scales
from paceline.models.json_fields import JsonFields
from paceline.models.quantized_formats.affine import AffineMatrix, AffineRows, has_short_mantissas, read_column_groups, words_as_bytes
from paceline.models.quantized_formats.fp8 import read_block_shape
from paceline.models.quantized_formats.module import PackedModule, QuantizedFormat
from paceline.models.quantized_formats.settings import nested_fields, read_choice, refuse_settings
from paceline.models.quantized_formats.small_floats import read_e2m1, read_e4m3, read_nvfp4
from paceline.models.storage.packed_matrix import PackedMatrix, RowSelection

_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
    "mixed-precision", "dense",
)  # fmt: skip
_IGNORED_SUFFIXES = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point", ".k_scale", ".v_scale", ".q_scale",
    ".k_zero_point", ".v_zero_point",
)  # fmt: skip
_SUPPORTED_BITS = (2, 4, 8)
_ACTIVATION_SETTINGS_IGNORED_NOTICE = "activations are rounded as for other quantised matrices: input_activations is ignored"
_KV_CACHE_NOTICE = "kv_cache_scheme is ignored: the option kv_cache_dtype sets the type of cached keys and values"


def compressed_tensors_format(fields: JsonFields) -> QuantizedFormat:
    """Return the format of a compressed-tensors `quantization_config`. How a matrix is packed follows from its tensors' names and types.

    Raises:
        CheckpointError: A format is not supported, or weights are sparse or transformed.
    """
    read_choice(fields, "format", _FORMATS, default="pack-quantized")
    read_choice(nested_fields(fields, "sparsity_config"), "format", ("dense",), default="dense")
    refuse_settings(fields, "transform_config")
    groups = nested_fields(fields, "config_groups")
    notices, block_shape = [], None
    for name in groups.values:
        group = nested_fields(groups, name)
        read_choice(group, "format", _FORMATS, default="pack-quantized")
        weights = nested_fields(group, "weights")
        block_shape = read_block_shape(weights, "block_structure") or block_shape
        if group.values.get("input_activations"):
            notices.append(_ACTIVATION_SETTINGS_IGNORED_NOTICE)
        refuse_settings(group, "output_activations")
    if fields.values.get("kv_cache_scheme"):
        notices.append(_KV_CACHE_NOTICE)
    name, suffixes = f"compressed-tensors, {fields.values.get('format', 'pack-quantized')}", (".weight_packed", ".weight_scale")
    read_matrix = partial(_read_matrix, block_shape=block_shape)
    return QuantizedFormat(name, suffixes, read_matrix, _IGNORED_SUFFIXES, tuple(dict.fromkeys(notices)))


def _read_matrix(module: PackedModule, *, block_shape: tuple[int, int] | None) -> PackedMatrix:
    if module.has_tensor("weight_packed"):
        return _read_packed_integers(module) if module.tensor_type("weight_packed") in ("I32", "U32") else _read_fp4(module)
    if module.tensor_type("weight") != "F8_E4M3":
        return _read_int8(module)
    module.drop_tensors("weight_zero_point")  # FP8 weights have no zero point; the tensor has only zeros
    return read_e4m3(module, "weight_scale", block_shape)


def _read_int8(module: PackedModule) -> PackedMatrix:
    where, codes = module.describe_tensor("weight"), module.read_tensor("weight", "I8")
    outputs, columns = codes.shape
    scales = module.read_floats("weight_scale", ndim=None)
    zeros = module.read_tensor("weight_zero_point", "I8", ndim=None) if module.has_tensor("weight_zero_point") else None
    scales, group_size = _expand_to_groups(scales, codes.shape, where, "weight_scale")
    zeros = None if zeros is None else _expand_to_groups(zeros, codes.shape, where, "weight_zero_point")[0]

    def read_rows(rows: RowSelection) -> AffineRows:
        zero_points = 128 if zeros is None else zeros[rows].astype(np.int32) + 128
        return AffineRows(codes[rows].view(np.uint8) ^ np.uint8(128), scales[rows].astype(np.float32), zero_points)

    arrays = (codes, scales) if zeros is None else (codes, scales, zeros)
    return AffineMatrix(
        error_location=where, shape=(outputs, columns), arrays=arrays, bits=8, group_size=group_size,
        zero_point=128 if zeros is None else None, has_15_bit_scales=has_short_mantissas(scales), read_rows=read_rows,
    ).to_packed_matrix()  # fmt: skip


def _read_packed_integers(module: PackedModule) -> PackedMatrix:
    """Read packed integers, stored plus 2^(bits - 1). A word has the codes of adjacent columns, or the zero points of adjacent rows."""
    where, words = module.describe_tensor("weight_packed"), module.read_tensor("weight_packed", "I32", "U32")
    shape = module.read_tensor("weight_shape", "I64", "I32", ndim=1)
    outputs, columns = (int(size) for size in shape) if len(shape) == 2 else (0, 0)
    bits = next((bits for bits in _SUPPORTED_BITS if -(-columns * bits // 32) == words.shape[1]), None)
    if bits is None or outputs != len(words) or columns == 0:
        raise CheckpointError(
            f"{where} has shape {list(words.shape)}, which holds no matrix of weight_shape {shape.tolist()} in 2, 4 or 8 bits; "
            "download the model again, or use a GGUF file of it"
        )
    scales, group_size = _expand_to_groups(module.read_floats("weight_scale", ndim=None), (outputs, columns), where, "weight_scale")
    zeros = module.read_tensor("weight_zero_point", "I32", "U32") if module.has_tensor("weight_zero_point") else None
    if zeros is not None and zeros.shape != (-(-outputs * bits // 32), scales.shape[1]):
        raise CheckpointError(
            f"{where}: weight_zero_point has shape {list(zeros.shape)}, expected {[-(-outputs * bits // 32), scales.shape[1]]} for "
            f"{outputs} rows of {bits} bits; download the model again"
        )
    column_groups = read_column_groups(module, "weight_g_idx", columns, group_size, scales.shape[1])

    def read_rows(rows: RowSelection) -> AffineRows:
        zero_points: NDArray[np.int32] | int = 1 << bits - 1
        if zeros is not None:
            numbers = np.arange(outputs)[rows]
            shifts = (numbers % (32 // bits) * bits).astype(np.uint32)[:, None]
            zero_points = (zeros[numbers * bits // 32] >> shifts & np.uint32(2**bits - 1)).astype(np.int32)
        return AffineRows(words_as_bytes(words[rows]), scales[rows].astype(np.float32), zero_points)

    arrays = tuple(array for array in (words, scales, zeros, None if column_groups is None else column_groups[None]) if array is not None)
    return AffineMatrix(
        error_location=where, shape=(outputs, columns), arrays=arrays, bits=bits, group_size=group_size, column_groups=column_groups,
        zero_point=1 << bits - 1 if zeros is None else None, has_15_bit_scales=has_short_mantissas(scales), read_rows=read_rows,
    ).to_packed_matrix()  # fmt: skip


def _expand_to_groups(scales: NDArray[Any], shape: tuple[int, ...], where: str, suffix: str) -> tuple[NDArray[Any], int]:
    """Return scales (or zero points) as [N, groups], and the group size. A single number is repeated for all groups."""
    outputs, columns = shape
    if scales.size == 1:
        return np.broadcast_to(scales.reshape(1, 1), (outputs, 1)), columns
    by_group = scales.reshape(outputs, 1) if scales.shape == (outputs,) else scales
    if by_group.ndim != 2 or len(by_group) != outputs or not by_group.shape[1] or columns % by_group.shape[1]:
        raise CheckpointError(
            f"{where} of {outputs} x {columns} values has {suffix} of shape {list(scales.shape)}, expected one, one a row or one a group; "
            "download the model again"
        )
    return by_group, columns // by_group.shape[1]


def _read_fp4(module: PackedModule) -> PackedMatrix:
    """Read an MXFP4 matrix, or an NVFP4 matrix, whose group scales are divided by a global scale."""
    if module.has_tensor("weight_global_scale"):
        return read_nvfp4(module, "weight_packed", "weight_global_scale", is_divisor=True)
    where, pairs = module.describe_tensor("weight_packed"), module.read_tensor("weight_packed", "U8")
    return read_e2m1(where, pairs, module.read_tensor("weight_scale", "U8", "F8_E8M0"), halved_e8m0_scales)
