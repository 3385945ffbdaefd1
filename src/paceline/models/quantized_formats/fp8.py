"""FP8: E4M3 weights with one scale for each block (DeepSeek, Qwen), each row (FBGEMM) or the whole matrix (Mistral)."""

from functools import partial

from paceline.errors import CheckpointError, shortened
from paceline.models.json_fields import JsonFields
from paceline.models.quantized_formats.module import QuantizedFormat
from paceline.models.quantized_formats.settings import read_choice
from paceline.models.quantized_formats.small_floats import read_e4m3

ACTIVATIONS_NOT_ROUNDED_NOTICE = "activations are not rounded to 8-bit floats, unlike in FP8 kernels"
_IGNORED_SUFFIXES = (".activation_scale", ".input_scale", ".k_scale", ".v_scale")


def fp8_format(fields: JsonFields) -> QuantizedFormat:
    """Return the format of an `fp8` quantization_config: weights with a scale for each block, as in DeepSeek-V3, or for each matrix.

    Raises:
        CheckpointError: The block size or the format is not supported.
    """
    read_choice(fields, "fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    block_shape = read_block_shape(fields, "weight_block_size")
    name = "FP8" if block_shape is None else f"FP8, blocks of {block_shape[0]} x {block_shape[1]}"
    read = partial(read_e4m3, scale_name="weight_scale_inv", block_shape=block_shape)
    return QuantizedFormat(name, (".weight_scale_inv",), read, _IGNORED_SUFFIXES, (ACTIVATIONS_NOT_ROUNDED_NOTICE,))


def fbgemm_fp8_format(_fields: JsonFields) -> QuantizedFormat:
    """Return the format of an `fbgemm_fp8` quantization_config: weights with one scale for each row."""
    read = partial(read_e4m3, scale_name="weight_scale")
    return QuantizedFormat("FP8 of FBGEMM", (".weight_scale",), read, _IGNORED_SUFFIXES, (ACTIVATIONS_NOT_ROUNDED_NOTICE,))


def read_block_shape(fields: JsonFields, name: str) -> tuple[int, int] | None:
    """Return how many rows and columns share a scale; None if the setting is absent.

    Raises:
        CheckpointError: The value is neither two counts nor text of the form 128x128.
    """
    value = fields.values.get(name)
    if value is None:
        return None
    sizes = value.split("x") if isinstance(value, str) else value
    if isinstance(sizes, list) and len(sizes) == 2 and all(str(size).isdigit() and len(str(size)) < 7 and int(size) > 0 for size in sizes):
        return int(sizes[0]), int(sizes[1])
    raise CheckpointError(f"{fields.path}: {name} = {shortened(value)}, expected rows and columns of a block, such as [128, 128]")
