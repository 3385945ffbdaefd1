"""MLX: codes of 2 to 8 bits with a scale and a minimum for each group. Bits and group size may differ by module."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from paceline.errors import CheckpointError
from paceline.models.json_fields import JsonFields
from paceline.models.quantized_formats.affine import AffineMatrix, AffineRows, words_as_bytes
from paceline.models.quantized_formats.module import PackedModule, QuantizedFormat
from paceline.models.quantized_formats.settings import read_choice
from paceline.models.storage.packed_matrix import PackedMatrix, RowSelection

_SUPPORTED_BITS = (2, 3, 4, 5, 6, 8)


def mlx_format(fields: JsonFields) -> QuantizedFormat:
    """Return the format that the `quantization` settings of an MLX checkpoint describe. Their mode must be affine.

    Raises:
        CheckpointError: The mode, the bits or the group size is not supported.
    """
    by_module = {"": _read_bits_and_group_size(fields)}
    for name, value in fields.values.items():
        if isinstance(value, Mapping):
            by_module["." + name] = _read_bits_and_group_size(JsonFields({"mode": fields.values.get("mode"), **value}, fields.path))
    return QuantizedFormat(f"MLX, {by_module[''][0]} bits", (".scales",), partial(_read_matrix, settings=by_module))


def _read_bits_and_group_size(fields: JsonFields) -> tuple[int, int]:
    read_choice(fields, "mode", ("affine",), default="affine")
    return read_choice(fields, "bits", _SUPPORTED_BITS), fields.integer("group_size")


def _read_matrix(module: PackedModule, *, settings: Mapping[str, tuple[int, int]]) -> PackedMatrix:
    where, words = module.describe_tensor("weight"), module.read_tensor("weight", "U32")
    scales, minimums = module.read_floats("scales"), module.read_floats("biases")
    suffix = "." + module.name.removeprefix("model.")  # config.json may name modules with the prefix of a multimodal model
    bits, group_size = next((found for name, found in settings.items() if name.endswith(suffix)), settings[""])
    outputs, num_groups = scales.shape
    if len(words) != outputs or minimums.shape != scales.shape or 32 * words.shape[1] != num_groups * group_size * bits:
        raise CheckpointError(
            f"{where} has shape {list(words.shape)}, scales {list(scales.shape)} and biases {list(minimums.shape)}, which do not match "
            f"{bits} bits in groups of {group_size}; config.json may belong to another model; otherwise download the model again"
        )

    def read_rows(rows: RowSelection) -> AffineRows:
        return AffineRows(words_as_bytes(words[rows]), scales[rows].astype(np.float32), minimums=minimums[rows].astype(np.float32))

    return AffineMatrix(
        error_location=where,
        shape=(outputs, num_groups * group_size),
        arrays=(words, scales, minimums),
        bits=bits,
        group_size=group_size,
        has_minimums=True,
        read_rows=read_rows,
    ).to_packed_matrix()
