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
from paceline.models.storage.stacked_experts import common_expert_name
from paceline.models.storage.stored_model import ENCODER_PREFIXES, TEXT_MODEL_PREFIXES, plain_name
from paceline.models.storage.tensor_file import FileTensor, read_tensors
from paceline.small_files import check_regular_file, is_file

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PEFT_PREFIX = "base_model.model."
_LOW_RANK_NAME = re.compile(r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.default)?(?:\.(weight|bias))?")
_OTHER_NAME = re.compile(r"(.+?)(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.(weight|bias)")
_BASE_LAYER = ".base_layer"
_FLOAT_TYPES = ("F32", "F16", "F64", "BF16")


class TensorRole(Enum):
    """Role of a tensor in an adapter file: a low-rank matrix, a bias, or a full replacement matrix."""

    DOWN = "lora_A"
    UP = "lora_B"
    UP_BIAS = "lora_B.bias"
    BIAS = "bias"
    FULL_WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The tensors of an adapter file for one module.

    Attributes:
        name: name of the module without prefixes of multimodal models, and with the common name of the module of experts.
        name_in_file: name of the module in the file, without PEFT's prefix.
        is_embedding: the low-rank matrices are lora_embedding_A and lora_embedding_B.
        tensors: full name in the file, and tensor, by role.
    """

    name: str
    name_in_file: str
    is_embedding: bool = False
    tensors: dict[TensorRole, tuple[str, FileTensor]] = field(default_factory=dict)

    def shape(self, role: TensorRole) -> tuple[int, ...] | None:
        found = self.tensors.get(role)
        return None if found is None else found[1].shape


def read_adapter_file(directory: Path, family: Family) -> tuple[Path, list[ModuleTensors]]:
    """Return the path of the adapter file in a directory, and its tensors for each module of the language model.

    Tensors of image and audio encoders are left out.

    Raises:
        CheckpointError: There is no file, it is damaged, or it holds tensors that no known LoRA adapter has.
        BackendUnavailableError: It is a PyTorch file, and torch is not installed.
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
        if not _without_peft_prefix(name).removeprefix("model.").startswith(ENCODER_PREFIXES)
    }
    if not text_tensors:
        found = "only tensors of image or audio encoders, and texts alone are read" if tensors else "no tensors"
        raise CheckpointError(f"{path} holds {found}: use another adapter")
    prefix = next((one for one in TEXT_MODEL_PREFIXES if any(_without_peft_prefix(name).startswith(one) for name in text_tensors)), None)
    entries: dict[tuple[str, bool], ModuleTensors] = {}
    unknown = []
    for name, tensor in text_tensors.items():
        parsed = _parse_tensor_name(_without_peft_prefix(name))
        if parsed is None:
            unknown.append(name)
            continue
        module, role, is_embedding = parsed
        plain = module if prefix is None else plain_name(module, prefix)
        entry = entries.setdefault((plain, is_embedding), ModuleTensors(_common_module_name(plain, family), module, is_embedding))
        if role in entry.tensors:
            raise CheckpointError(f"{path} holds {name} and {entry.tensors[role][0]}, which are the same: export the adapter again")
        entry.tensors[role] = (name, tensor)
    if unknown:
        raise CheckpointError(f"{path} holds {name_list(unknown)} that no plain LoRA adapter has: it may compute something else with them")
    return path, list(entries.values())


def adapter_files(directory: Path) -> tuple[Path, ...]:
    """Return a tuple with the path of the file that holds an adapter's tensors; empty if there is no such file."""
    return tuple(directory / name for name in ADAPTER_FILES if is_file(directory / name))[:1]


def as_float32(path: Path, name: str, tensor: FileTensor) -> NDArray[np.float32]:
    """Return a copy of a tensor in float32.

    Raises:
        CheckpointError: The tensor has no float type, or a value is not finite.
    """
    if tensor.dtype not in _FLOAT_TYPES:
        raise CheckpointError(f"{path}: tensor {name} is of type {tensor.dtype}, supported are {', '.join(_FLOAT_TYPES)}: export it again")
    stored = tensor.open()
    if tensor.dtype == "BF16":
        values = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        with np.errstate(over="ignore"):
            values = stored.astype(np.float32)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{path}: tensor {name} holds NaN or infinite values: its training failed, or the file is damaged")
    return values


def without_base_layers(module: str) -> str:
    """Return a module's name without PEFT's suffix `.base_layer`, which is repeated if several parameters of the module are adapted."""
    while module.endswith(_BASE_LAYER):
        module = module.removesuffix(_BASE_LAYER)
    return module


def _without_peft_prefix(name: str) -> str:
    return name.removeprefix(_PEFT_PREFIX)


def _parse_tensor_name(name: str) -> tuple[str, TensorRole, bool] | None:
    """Return a tensor's module, its role, and whether the module is an embedding; None if the name is unknown."""
    if (found := _LOW_RANK_NAME.fullmatch(name)) is not None:
        module, matrix, leaf = found.groups()
        is_embedding = matrix.startswith("lora_embedding_")
        role = TensorRole.DOWN if matrix.endswith("A") else TensorRole.UP
        if leaf == "bias":
            return None if role is TensorRole.DOWN or is_embedding else (module, TensorRole.UP_BIAS, False)
        return module, role, is_embedding
    if (found := _OTHER_NAME.fullmatch(name)) is not None and ".lora_" not in name:
        return found[1], TensorRole(found[2]), False
    return None


def _common_module_name(module: str, family: Family) -> str:
    """Return a module's name with experts named as most families name them (`common_expert_name`)."""
    plain = without_base_layers(module)
    common = common_expert_name(f"{plain}.weight", family).removesuffix(".weight")
    return common if common != plain else common_expert_name(f"{plain}.down_proj", family).removesuffix(".down_proj")
