"""The quantisation methods that are supported in safetensors files, by `quant_method`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, shortened
from paceline.models.families.family import Family
from paceline.models.json_fields import JsonFields
from paceline.models.quantized_formats.auto_round import auto_round_format
from paceline.models.quantized_formats.awq import awq_format
from paceline.models.quantized_formats.bitsandbytes import bitsandbytes_format
from paceline.models.quantized_formats.compressed_tensors import compressed_tensors_format
from paceline.models.quantized_formats.fp8 import fbgemm_fp8_format, fp8_format
from paceline.models.quantized_formats.gptq import gptq_format
from paceline.models.quantized_formats.mlx import mlx_format
from paceline.models.quantized_formats.modelopt import modelopt_format
from paceline.models.quantized_formats.module import PackedModule, QuantizedFormat, StoredWeight
from paceline.models.storage.packed_matrix import PackedMatrix
from paceline.models.storage.safetensors_file import StoredTensor
from paceline.small_files import read_json


@dataclass(frozen=True, slots=True)
class QuantizationMethod:
    """A quantisation method.

    Attributes:
        title: name in the table of docs/models.md.
        memory_format: how its matrices are held in memory, for the same table.
        make_format: function that returns the format which the method's settings in config.json describe.
    """

    title: str
    memory_format: str
    make_format: Callable[[JsonFields], QuantizedFormat]


_GROUPED_CODES = "groups of integer codes"
_MODEL_FLOATS = "floats of the model's type"
METHODS: Mapping[str, QuantizationMethod] = {
    "gptq": QuantizationMethod(
        "GPTQ, both formats, 2, 4 or 8 bits", f"{_GROUPED_CODES}; with `desc_act` out of order {_MODEL_FLOATS}", gptq_format
    ),
    "awq": QuantizationMethod("AWQ (GEMM), 4 bits", _GROUPED_CODES, awq_format),
    "auto-round": QuantizationMethod("AutoRound, packed as GPTQ or AWQ", _GROUPED_CODES, auto_round_format),
    "compressed-tensors": QuantizationMethod(
        "compressed-tensors: integers of 2, 4 or 8 bits, NVFP4, MXFP4; 8-bit floats",
        f"{_GROUPED_CODES}; 8-bit floats and [some integers](quantised.md#quantised-checkpoints-of-other-tools): {_MODEL_FLOATS}",
        compressed_tensors_format,
    ),
    "fp8": QuantizationMethod("FP8 by block or tensor", _MODEL_FLOATS, fp8_format),
    "fbgemm_fp8": QuantizationMethod("FP8 by row (FBGEMM)", _MODEL_FLOATS, fbgemm_fp8_format),
    "modelopt": QuantizationMethod("ModelOpt: NVFP4; FP8", f"{_GROUPED_CODES}; FP8: {_MODEL_FLOATS}", modelopt_format),
    "bitsandbytes": QuantizationMethod("bitsandbytes: int8; nf4, fp4", f"{_GROUPED_CODES}; nf4, fp4: {_MODEL_FLOATS}", bitsandbytes_format),
    "mlx": QuantizationMethod("MLX, affine, 2 to 6 or 8 bits", _GROUPED_CODES, mlx_format),
}
"""Supported methods, by `quant_method` in config.json. MLX files have no such field."""

_METHOD_ALIASES = {"intel/auto-round": "auto-round", "autoround": "auto-round", "nvfp4": "modelopt", "modelopt_fp4": "modelopt"}
_SETTINGS_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Settings files of AutoGPTQ and AutoAWQ, read if config.json has no settings."""
_PACKED_TYPES = ("I32", "U32", "U8", "I8", "F8_E4M3", "F8_E5M2")


def find_quantized_format(
    values: Mapping[str, Any], path: Path, family: Family, *, reads_settings_files: bool = True
) -> QuantizedFormat | None:
    """Return the format of a checkpoint's quantised matrices; None = its matrices are not packed, or are gpt-oss experts in MXFP4.

    Args:
        values: the fields of config.json, or of its text model if the checkpoint is multimodal.
        path: path of the config.json.
        reads_settings_files: if config.json has no settings, also look for the settings files of older tools.

    Raises:
        CheckpointError: The method or a setting is not supported.
    """
    found = _quantization_settings(values, path) or (_read_settings_file(path) if reads_settings_files else None)
    if found is None or (found[0] == "mxfp4" and family.has_mxfp4_experts):
        return None
    name, settings = found
    method = METHODS.get(_METHOD_ALIASES.get(name, name))
    if method is None:
        raise CheckpointError(
            f"{path}: the weights are quantised ({shortened(name)}); supported are {', '.join(METHODS)}, f32, f16 and bf16: "
            "use the model it was made from, or a GGUF file of it"
        )
    return method.make_format(settings)


def _quantization_settings(values: Mapping[str, Any], path: Path) -> tuple[str, JsonFields] | None:
    """Return the name of the quantisation method and its settings in config.json; None if there are none."""
    for key in ("quantization_config", "compression_config", "quantization"):
        found = values.get(key)
        if found is None or found == {}:
            continue
        if not isinstance(found, Mapping):
            raise CheckpointError(
                f"{path}: the weights are quantised ({shortened(found)}): {key} is not an object; use another copy of the model"
            )
        method = found.get("quant_method")
        is_mlx = method is None and {"group_size", "bits"} <= found.keys()
        name = "mlx" if is_mlx else "modelopt" if method is None and "quant_algo" in found else method or "unknown"
        return name if isinstance(name, str) else shortened(name), JsonFields(found, path)
    return None


def _read_settings_file(path: Path) -> tuple[str, JsonFields] | None:
    """Return the quantisation method and its settings from a file of AutoGPTQ or AutoAWQ next to `path`; None if there is no such file."""
    for file, name in _SETTINGS_FILES.items():
        values = read_json(path.with_name(file))
        if values:
            return name, JsonFields(values, path.with_name(file))
    return None


def group_packed_tensors(
    stored: Mapping[str, StoredTensor], files: Mapping[Path, NDArray[np.uint8]], quantized_format: QuantizedFormat
) -> dict[str, StoredWeight]:
    """Return the tensors, with the tensors of each packed matrix replaced by one `PackedMatrix`. Codes are not read yet.

    Raises:
        CheckpointError: A tensor of a matrix is missing, or their shapes do not match.
    """
    ignored = quantized_format.ignored_suffixes
    tensors: dict[str, StoredWeight] = {name: tensor for name, tensor in stored.items() if not name.endswith(ignored)}
    for name in stored:
        suffix = next((suffix for suffix in quantized_format.packed_suffixes if name.endswith(suffix)), None)
        if suffix is not None and name in tensors:
            module = PackedModule(name.removesuffix(suffix), tensors, files)
            packed = quantized_format.read_matrix(module)
            if f"{module.name}.weight" in tensors:
                raise CheckpointError(
                    f"{stored[name].path}: {module.name} is stored twice, packed ({name}) and unpacked ({module.name}.weight); "
                    "download the model again"
                )
            tensors[f"{module.name}.weight"] = packed
    for name, tensor in tensors.items():
        if not isinstance(tensor, PackedMatrix) and tensor.dtype in _PACKED_TYPES:
            raise CheckpointError(
                f"{tensor.path}: tensor {name} of type {tensor.dtype} is packed, but not in the format {quantized_format.name}, or its "
                "scales are missing; download the model again"
            )
    return tensors
