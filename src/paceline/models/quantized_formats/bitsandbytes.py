"""bitsandbytes: nf4 and fp4 with a scale for each block of the flattened matrix, and int8 with a scale for each row."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, shortened
from paceline.models.json_fields import JsonFields
from paceline.models.quantized_formats.affine import AffineMatrix, AffineRows
from paceline.models.quantized_formats.module import PackedModule, QuantizedFormat
from paceline.models.storage.packed_matrix import Floats, PackedMatrix, RowSelection

_QUANT_STATE_SUFFIX = "weight.quant_state.bitsandbytes__"
_4BIT_TYPES = ("nf4", "fp4")
_MAX_QUANT_STATE_BYTES = 1 << 16
_OUTLIER_NOTICE = "outlier columns are multiplied like all others, not in float16 as llm_int8_threshold specifies"


def bitsandbytes_format(fields: JsonFields) -> QuantizedFormat:
    """Return the format that a bitsandbytes `quantization_config` describes.

    Raises:
        CheckpointError: The settings name neither 4-bit nor 8-bit weights.
    """
    if fields.flag("load_in_4bit", default=False):
        kind = fields.values.get("bnb_4bit_quant_type", "fp4")
        return QuantizedFormat(f"bitsandbytes, {shortened(kind)}", (".weight.absmax",), _read_4bit)
    if not fields.flag("load_in_8bit", default=False):
        raise CheckpointError(f"{fields.path}: quantization_config of bitsandbytes has neither load_in_4bit nor load_in_8bit")
    return QuantizedFormat("bitsandbytes, int8", (".SCB",), _read_int8, notices=(_OUTLIER_NOTICE,))


def _read_int8(module: PackedModule) -> PackedMatrix:
    """Read code * (row maximum / 127). The scale is rounded first, so values differ from bitsandbytes' by a factor of at most 1 + 2^-23."""
    where, codes, largest = module.describe_tensor("weight"), module.read_tensor("weight", "I8"), module.read_tensor("SCB", "F32", ndim=1)
    if module.has_tensor("weight_format"):
        layout = module.read_tensor("weight_format", "U8", ndim=None)
        if layout.any():
            raise CheckpointError(
                f"{where} is stored in tiles for a GPU (weight_format {shortened(layout.tolist())}): save the model again"
            )
    outputs, columns = codes.shape
    if largest.shape != (outputs,):
        raise CheckpointError(f"{where} has {outputs} rows, but SCB {largest.size} numbers; download the model again")

    def read_rows(rows: RowSelection) -> AffineRows:
        scales: Floats = np.divide(largest[rows], 127, dtype=np.float32)[:, None]
        return AffineRows(codes[rows].view(np.uint8) ^ np.uint8(128), scales, 128)

    return AffineMatrix(
        error_location=where, shape=(outputs, columns), arrays=(codes, largest[:, None]), bits=8, group_size=columns, zero_point=128,
        read_rows=read_rows,
    ).to_packed_matrix()  # fmt: skip


def _read_4bit(module: PackedModule) -> PackedMatrix:
    where = module.describe_tensor("weight")
    kind = next((kind for kind in _4BIT_TYPES if module.has_tensor(_QUANT_STATE_SUFFIX + kind)), None)
    if kind is None:
        raise CheckpointError(f"{where} is packed, but lacks its quant_state of nf4 or fp4; download the model again")
    state = _read_quant_state(module.read_tensor(_QUANT_STATE_SUFFIX + kind, "U8", ndim=1), where)
    shape, block_size = state.values.get("shape"), state.integer("blocksize", maximum=1 << 20)
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and 0 < size < 2**31 for size in shape):
        raise CheckpointError(
            f"{where}: shape = {shortened(shape)} of its quant_state, expected rows and columns; download the model again"
        )
    outputs, columns = shape
    table = module.read_tensor("weight.quant_map", "F32", ndim=1)
    packed = module.read_tensor("weight", "U8", "I8", "F16", "BF16", "F32", ndim=None)
    packed, size = np.ascontiguousarray(packed).reshape(-1).view(np.uint8), outputs * columns
    scale_arrays, block_scales = _read_block_scales(module, state, -(-size // block_size), where)
    if packed.size != -(-size // 2) or table.shape != (16,):
        raise CheckpointError(
            f"{where} has {packed.size} bytes and a table of {table.size}, but {outputs} x {columns} values of 4 bits take "
            f"{-(-size // 2)} and 16; download the model again"
        )

    def read_rows(rows: RowSelection) -> Floats:
        numbers = np.arange(outputs)[rows][:, None] * columns + np.arange(columns)
        code_pairs = packed[numbers // 2]
        codes = np.where(numbers % 2 == 0, code_pairs >> np.uint8(4), code_pairs & np.uint8(15))
        blocks, block_indices = np.unique(numbers // block_size, return_inverse=True)
        values: Floats = table[codes] * block_scales(blocks)[block_indices.reshape(codes.shape)]
        return values

    return PackedMatrix(where, (outputs, columns), None, 0, (packed[:, None], *scale_arrays), read_rows)


def _read_quant_state(content: NDArray[np.uint8], where: str) -> JsonFields:
    """Parse the quant_state of a matrix, a JSON object stored as the bytes of a tensor."""
    try:
        values = json.loads(content[:_MAX_QUANT_STATE_BYTES].tobytes())
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise CheckpointError(f"{where}: its quant_state is not a JSON object; the file is damaged, download it again")
    return JsonFields(values, Path(where))


def _read_block_scales(module: PackedModule, state: JsonFields, num_blocks: int, where: str) -> tuple[tuple[NDArray[Any], ...], Any]:
    """Return the stored arrays of scales, and a function from block indices to scales. Scales may be quantised themselves."""
    nested = module.has_tensor("weight.nested_absmax")
    stored = module.read_tensor("weight.absmax", "U8" if nested else "F32", ndim=1)
    if stored.shape != (num_blocks,):
        raise CheckpointError(f"{where} has {stored.size} scales for {num_blocks} blocks; download the model again")
    if not nested:
        return (stored[:, None],), lambda blocks: stored[blocks]
    largest, table = module.read_tensor("weight.nested_absmax", "F32", ndim=1), module.read_tensor("weight.nested_quant_map", "F32", ndim=1)
    block_size, offset = state.integer("nested_blocksize", maximum=1 << 20), np.float32(state.number("nested_offset", math.nan))
    if largest.size != -(-num_blocks // block_size) or table.shape != (256,):
        raise CheckpointError(
            f"{where} has {largest.size} scales of scales and a table of {table.size}, expected {-(-num_blocks // block_size)} and 256; "
            "download the model again"
        )

    def dequantize_scales(blocks: NDArray[np.int64]) -> Floats:
        values: Floats = table[stored[blocks]] * largest[blocks // block_size] + offset
        return values

    return (stored[:, None], largest[:, None]), dequantize_scales
