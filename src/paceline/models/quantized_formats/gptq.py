"""GPTQ: codes packed along the input dimension, zero points along the output dimension (AutoGPTQ, GPTQModel, AutoRound)."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.json_fields import JsonFields
from paceline.models.quantized_formats.affine import AffineMatrix, AffineRows, has_short_mantissas, read_column_groups, words_as_bytes
from paceline.models.quantized_formats.module import PackedModule, QuantizedFormat
from paceline.models.quantized_formats.settings import read_choice, read_group_size
from paceline.models.storage.packed_matrix import PackedMatrix, RowSelection

_SUPPORTED_BITS = (2, 4, 8)  # 3-bit codes are not supported: they would cross word boundaries


def gptq_format(fields: JsonFields) -> QuantizedFormat:
    """Return the format that a GPTQ `quantization_config` describes.

    Raises:
        CheckpointError: The bits, the group size or the packing is not supported.
    """
    key = "checkpoint_format" if "checkpoint_format" in fields.values else "format"
    is_gptq_v2 = read_choice(fields, key, ("gptq", "gptq_v2"), default="gptq") == "gptq_v2"
    return gptq_layout_format(fields, "GPTQ", is_gptq_v2=is_gptq_v2)


def gptq_layout_format(fields: JsonFields, tool: str, *, is_gptq_v2: bool) -> QuantizedFormat:
    """Return the format of codes packed as in GPTQ.

    Args:
        tool: name of the tool that wrote the file.
        is_gptq_v2: the settings name the format gptq_v2. It stores zero points unchanged, the original format stores them minus 1.
    """
    bits = read_choice(fields, "bits", _SUPPORTED_BITS, default=4)
    read = partial(
        _read_matrix,
        bits=bits,
        group_size=read_group_size(fields),
        is_gptq_v2=is_gptq_v2,
        is_symmetric=fields.flag("sym", default=True),
        has_module_overrides=bool(fields.values.get("dynamic") or fields.values.get("extra_config")),
    )
    return QuantizedFormat(f"{tool}, {bits} bits", (".qweight",), read)


def _read_matrix(
    module: PackedModule, *, bits: int, group_size: int, is_gptq_v2: bool, is_symmetric: bool, has_module_overrides: bool
) -> PackedMatrix:
    """Read a matrix. With `has_module_overrides`, bits and group size follow from its tensors' shapes instead of config.json."""
    where = module.describe_tensor("qweight")
    codes, zeros = module.read_tensor("qweight", "I32", "U32"), module.read_tensor("qzeros", "I32", "U32")
    scales = module.read_floats("scales")
    outputs = codes.shape[1]
    if has_module_overrides and outputs and zeros.shape[1]:
        bits = 32 * zeros.shape[1] // outputs
    if bits not in _SUPPORTED_BITS or codes.shape[0] * 32 % bits:
        raise CheckpointError(f"{where} holds codes of {bits} bits, supported are 2, 4 and 8: use a GGUF file of the model")
    columns = codes.shape[0] * 32 // bits
    stated, group_size = group_size, columns if group_size == -1 else group_size
    if has_module_overrides and columns % len(scales) == 0:
        group_size = columns // len(scales)
    num_groups = -(-columns // group_size)
    for part, array, row_size in (("qzeros", zeros, -(-outputs * bits // 32)), ("scales", scales, outputs)):
        if array.shape != (expected := (num_groups, row_size)):
            raise CheckpointError(
                f"{where} has shape {list(codes.shape)}, so {part} must have shape {list(expected)} with {bits} bits "
                f"in groups of {stated}, but has {list(array.shape)}; config.json may belong to another model; "
                "otherwise download the model again"
            )
    offset = 0 if _has_unchanged_zero_points(zeros, bits, is_gptq_v2=is_gptq_v2, is_symmetric=is_symmetric) else 1
    words = {int(word) for word in np.unique(zeros)} if zeros.size else set()
    zero_point = _zero_point_of_word(words.pop(), bits, offset) if len(words) == 1 else None

    def read_rows(rows: RowSelection) -> AffineRows:
        numbers = np.arange(outputs)[rows]
        shifts = (numbers % (32 // bits) * bits).astype(np.uint32)
        zero_points = (zeros[:, numbers * bits // 32] >> shifts & np.uint32(2**bits - 1)).astype(np.int32) + offset & 2**bits - 1
        row_scales = np.ascontiguousarray(scales[:, rows].T, np.float32)
        return AffineRows(words_as_bytes(codes[:, rows].T), row_scales, np.ascontiguousarray(zero_points.T))

    column_groups = read_column_groups(module, "g_idx", columns, group_size, len(scales))
    arrays = (codes, zeros, scales, np.array([[offset]]), *(() if column_groups is None else (column_groups[None],)))
    return AffineMatrix(
        error_location=where, shape=(outputs, columns), arrays=arrays, bits=bits, group_size=group_size, zero_point=zero_point,
        has_15_bit_scales=has_short_mantissas(scales), column_groups=column_groups, read_rows=read_rows,
    ).to_packed_matrix()  # fmt: skip


def _has_unchanged_zero_points(zeros: NDArray[np.uint32], bits: int, *, is_gptq_v2: bool, is_symmetric: bool) -> bool:
    """Return whether zero points are stored as is, not minus 1. With symmetric quantisation, their values show if the setting is wrong."""
    middle = sum(1 << (bits - 1 + shift) for shift in range(0, 32, bits))  # a 32-bit word of zero points 2^(bits - 1)
    ones = sum(1 << shift for shift in range(0, 32, bits))
    if is_symmetric and zeros.size and (zeros == (middle - ones if is_gptq_v2 else middle)).all():
        return not is_gptq_v2
    return is_gptq_v2


def _zero_point_of_word(word: int, bits: int, offset: int) -> int | None:
    """Return the common value of all zero points packed in a 32-bit word, plus `offset`; None if they differ."""
    zero_point = {(word >> shift) + offset & 2**bits - 1 for shift in range(0, 32, bits)}
    return zero_point.pop() if len(zero_point) == 1 else None
