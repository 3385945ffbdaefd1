"""The supported methods of quantised weights in safetensors files, by `quant_method`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, shortened
from paceline.models.containers.auto_round import auto_round_container
from paceline.models.containers.awq import awq_container
from paceline.models.containers.bitsandbytes import bitsandbytes_container
from paceline.models.containers.compressed_tensors import compressed_tensors_container
from paceline.models.containers.fp8 import fbgemm_fp8_container, fp8_container
from paceline.models.containers.gptq import gptq_container
from paceline.models.containers.mlx import mlx_container
from paceline.models.containers.modelopt import modelopt_container
from paceline.models.containers.module import Container, PackedModule, StoredWeight
from paceline.models.families.family import Family
from paceline.models.json_fields import JsonFields
from paceline.models.storage.packed_matrix import PackedMatrix
from paceline.models.storage.safetensors_file import StoredTensor
from paceline.small_files import read_json


@dataclass(frozen=True, slots=True)
class QuantizationMethod:
    """A quantisation method.

    Attributes:
        title: name in the table of docs/models.md.
        in_memory: how its matrices are held in memory, in the same table.
        make_container: function from the method's settings in config.json to the container.
    """

    title: str
    in_memory: str
    make_container: Callable[[JsonFields], Container]


_GROUPS = "groups of integer codes"
_FLOATS = "floats of the model's type"
METHODS: Mapping[str, QuantizationMethod] = {
    "gptq": QuantizationMethod("GPTQ, both formats, 2, 4 or 8 bits", f"{_GROUPS}; with `desc_act` out of order {_FLOATS}", gptq_container),
    "awq": QuantizationMethod("AWQ (GEMM), 4 bits", _GROUPS, awq_container),
    "auto-round": QuantizationMethod("AutoRound, packed as GPTQ or AWQ", _GROUPS, auto_round_container),
    "compressed-tensors": QuantizationMethod(
        "compressed-tensors: integers of 2, 4 or 8 bits, NVFP4, MXFP4; 8-bit floats",
        f"{_GROUPS}; 8-bit floats and [some integers](quantised.md#quantised-checkpoints-of-other-tools): {_FLOATS}",
        compressed_tensors_container,
    ),
    "fp8": QuantizationMethod("FP8 by block or tensor", _FLOATS, fp8_container),
    "fbgemm_fp8": QuantizationMethod("FP8 by row (FBGEMM)", _FLOATS, fbgemm_fp8_container),
    "modelopt": QuantizationMethod("ModelOpt: NVFP4; FP8", f"{_GROUPS}; FP8: {_FLOATS}", modelopt_container),
    "bitsandbytes": QuantizationMethod("bitsandbytes: int8; nf4, fp4", f"{_GROUPS}; nf4, fp4: {_FLOATS}", bitsandbytes_container),
    "mlx": QuantizationMethod("MLX, affine, 2 to 6 or 8 bits", _GROUPS, mlx_container),
}
"""Supported methods, by `quant_method` in config.json. MLX files have no such field."""

_METHOD_ALIASES = {"intel/auto-round": "auto-round", "autoround": "auto-round", "nvfp4": "modelopt", "modelopt_fp4": "modelopt"}
_SETTINGS_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Settings files of AutoGPTQ and AutoAWQ, read if config.json has no settings."""
_PACKED_TYPES = ("I32", "U32", "U8", "I8", "F8_E4M3", "F8_E5M2")


def find_container(values: Mapping[str, Any], path: Path, family: Family, *, reads_settings_files: bool = True) -> Container | None:
    """Return the container of a checkpoint; None = its matrices are not packed, or are gpt-oss experts in MXFP4.

    Args:
        values: the fields of config.json, of its text model if it is multimodal.
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
    return method.make_container(settings)


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
    """Return the method and its settings from the settings file of an older tool; None if there is no such file."""
    for file, name in _SETTINGS_FILES.items():
        values = read_json(path.with_name(file))
        if values:
            return name, JsonFields(values, path.with_name(file))
    return None


def group_packed_tensors(
    stored: Mapping[str, StoredTensor], files: Mapping[Path, NDArray[np.uint8]], container: Container
) -> dict[str, StoredWeight]:
    """Return the tensors, with the tensors of each packed matrix replaced by one `PackedMatrix`. Codes are not read yet.

    Raises:
        CheckpointError: A tensor of a matrix is missing, or their shapes do not match.
    """
    tensors: dict[str, StoredWeight] = {name: tensor for name, tensor in stored.items() if not name.endswith(container.ignored_suffixes)}
    for name in stored:
        suffix = next((suffix for suffix in container.packed_suffixes if name.endswith(suffix)), None)
        if suffix is not None and name in tensors:
            module = PackedModule(name.removesuffix(suffix), tensors, files)
            packed = container.read_matrix(module)
            if f"{module.name}.weight" in tensors:
                raise CheckpointError(
                    f"{stored[name].path}: {module.name} is stored twice, packed ({name}) and unpacked ({module.name}.weight); "
                    "download the model again"
                )
            tensors[f"{module.name}.weight"] = packed
    for name, tensor in tensors.items():
        if not isinstance(tensor, PackedMatrix) and tensor.dtype in _PACKED_TYPES:
            raise CheckpointError(
                f"{tensor.path}: tensor {name} of type {tensor.dtype} is packed, but not in the format {container.name}, or its scales "
                "are missing; download the model again"
            )
    return tensors
