"""Read the tensors of an adapter file, grouped by the module that they adapt."""

import os
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, name_list
from paceline.models.families.family import Family
from paceline.models.storage.stacked_experts import standard_expert_name
from paceline.models.storage.stored_model import ENCODER_PREFIXES, TEXT_MODEL_PREFIXES, replace_multimodal_prefix
from paceline.models.storage.tensor_file import FileTensor, read_tensors
from paceline.small_files import check_regular_file, is_file

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PEFT_PREFIX = "base_model.model."
_LORA_TENSOR_NAME_PATTERN = re.compile(r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.default)?(?:\.(weight|bias))?")
_BIAS_OR_WEIGHT_NAME_PATTERN = re.compile(r"(.+?)(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.(weight|bias)")
_BASE_LAYER_SUFFIX = ".base_layer"
_FLOAT_TYPES = ("F32", "F16", "F64", "BF16")


class TensorRole(Enum):
    """Role of a tensor in an adapter file: a low-rank matrix, a bias, or a full replacement matrix."""

    LORA_A = "lora_A"
    LORA_B = "lora_B"
    LORA_B_BIAS = "lora_B.bias"
    BIAS = "bias"
    FULL_WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The tensors of an adapter file for one module.

    Attributes:
        name: name of the module, without prefixes of multimodal models. Experts are named `mlp.experts.{index}.gate_proj` and so on.
        name_in_file: name of the module in the file, without PEFT's prefix.
        is_embedding: whether the low-rank matrices are lora_embedding_A and lora_embedding_B.
        tensors: for each role the full name of the tensor in the file, and the tensor.
    """

    name: str
    name_in_file: str
    is_embedding: bool = False
    tensors: dict[TensorRole, tuple[str, FileTensor]] = field(default_factory=dict)

    def tensor_shape(self, role: TensorRole) -> tuple[int, ...] | None:
        found = self.tensors.get(role)
        return None if found is None else found[1].shape


def read_adapter_file(directory: Path, family: Family) -> tuple[Path, list[ModuleTensors]]:
    """Return the path of the adapter file in a directory, and its tensors for each module of the language model.

    Tensors of image and audio encoders are left out.

    Raises:
        CheckpointError: The file is missing or damaged, or holds tensors that no known LoRA adapter has.
        BackendUnavailableError: The file is a PyTorch file, and torch is not installed.
    """
    path = next(iter((*adapter_files(directory), *(path for name in ADAPTER_FILES if os.path.lexists(path := directory / name)))), None)
    if path is None:
        raise CheckpointError(
            f"{directory} holds neither {' nor '.join(ADAPTER_FILES)}: give the directory of a LoRA adapter, or download it again"
        )
    check_regular_file(path)
    tensors = read_tensors(path, "adapter")
    text_tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.removeprefix(_PEFT_PREFIX).removeprefix("model.").startswith(ENCODER_PREFIXES)
    }
    if not text_tensors:
        found = "only tensors of image or audio encoders, which are not supported" if tensors else "no tensors"
        raise CheckpointError(f"{path} holds {found}: use another adapter")
    names = [name.removeprefix(_PEFT_PREFIX) for name in text_tensors]
    prefix = next((prefix for prefix in TEXT_MODEL_PREFIXES if any(name.startswith(prefix) for name in names)), None)
    by_module: dict[tuple[str, bool], ModuleTensors] = {}  # key: module, and whether its low-rank matrices are those of an embedding
    unknown = []
    for name, tensor in text_tensors.items():
        parsed = _parse_tensor_name(name.removeprefix(_PEFT_PREFIX))
        if parsed is None:
            unknown.append(name)
            continue
        module, role, is_embedding = parsed
        plain = module if prefix is None else replace_multimodal_prefix(module, prefix)
        adapted = by_module.setdefault((plain, is_embedding), ModuleTensors(_standard_module_name(plain, family), module, is_embedding))
        if role in adapted.tensors:
            raise CheckpointError(f"{path} holds {name} and {adapted.tensors[role][0]}, which are the same tensor: export it again")
        adapted.tensors[role] = (name, tensor)
    if unknown:
        raise CheckpointError(f"{path} holds {name_list(unknown)} that no plain LoRA adapter has: it may compute something else with them")
    return path, list(by_module.values())


def adapter_files(directory: Path) -> tuple[Path, ...]:
    """Return the path of the file with the adapter's tensors, as a tuple; an empty tuple if `directory` has no such file."""
    return tuple(directory / name for name in ADAPTER_FILES if is_file(directory / name))[:1]


def as_float32(path: Path, name: str, tensor: FileTensor) -> NDArray[np.float32]:
    """Return a copy of a tensor in float32.

    Raises:
        CheckpointError: The tensor has no float type, or a value is not finite.
    """
    if tensor.dtype not in _FLOAT_TYPES:
        raise CheckpointError(f"{path}: tensor {name} is of type {tensor.dtype}, supported are {', '.join(_FLOAT_TYPES)}: export it again")
    stored = tensor.read_values()
    if tensor.dtype == "BF16":
        values = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        with np.errstate(over="ignore"):
            values = stored.astype(np.float32)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{path}: tensor {name} holds NaN or infinite values: its training failed, or the file is damaged")
    return values


def strip_base_layer_suffix(module: str) -> str:
    """Return a module's name without the suffix `.base_layer`, which PEFT appends once for each adapted parameter of the module."""
    while module.endswith(_BASE_LAYER_SUFFIX):
        module = module.removesuffix(_BASE_LAYER_SUFFIX)
    return module


def _parse_tensor_name(name: str) -> tuple[str, TensorRole, bool] | None:
    """Return a tensor's module, its role (such as lora_A or bias) and whether the module is an embedding; None if the name is unknown."""
    if (found := _LORA_TENSOR_NAME_PATTERN.fullmatch(name)) is not None:
        module, matrix, leaf = found.groups()
        is_embedding = matrix.startswith("lora_embedding_")
        role = TensorRole.LORA_A if matrix.endswith("A") else TensorRole.LORA_B
        if leaf == "bias":
            return None if role is TensorRole.LORA_A or is_embedding else (module, TensorRole.LORA_B_BIAS, False)
        return module, role, is_embedding
    if (found := _BIAS_OR_WEIGHT_NAME_PATTERN.fullmatch(name)) is not None and ".lora_" not in name:
        return found[1], TensorRole(found[2]), False
    return None


def _standard_module_name(module: str, family: Family) -> str:
    """Return a module's name, with `mlp.experts.{index}.gate_proj` and so on for the matrices of experts."""
    plain = strip_base_layer_suffix(module)
    standard = standard_expert_name(f"{plain}.weight", family).removesuffix(".weight")
    return standard if standard != plain else standard_expert_name(f"{plain}.down_proj", family).removesuffix(".down_proj")
