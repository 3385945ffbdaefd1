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

FILES = ("adapter_model.safetensors", "adapter_model.bin")
_WRAPPER = "base_model.model."
_LOW_RANK = re.compile(r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.default)?(?:\.(weight|bias))?")
_WHOLE = re.compile(r"(.+?)(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.(weight|bias)")
_STACKED = ".base_layer"
_FLOATS = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}


class TensorRole(Enum):
    """The role of a tensor of an adapter file for the module that it adapts."""

    DOWN = "lora_A"
    UP = "lora_B"
    UP_BIAS = "lora_B.bias"
    BIAS = "bias"
    WHOLE = "weight"


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The tensors of a file for one module.

    Attributes:
        name: the module, without wrapper prefixes; experts are named alike in all families.
        in_file: its name in the file, without PEFT's prefix.
        is_embedding: the low-rank matrices are lora_embedding_A and lora_embedding_B.
        tensors: with their full names in the file, for errors.
    """

    name: str
    in_file: str
    is_embedding: bool = False
    tensors: dict[TensorRole, tuple[str, FileTensor]] = field(default_factory=dict)

    def shape(self, kind: TensorRole) -> tuple[int, ...] | None:
        found = self.tensors.get(kind)
        return None if found is None else found[1].shape


def read_adapter_file(directory: Path, family: Family) -> tuple[Path, list[ModuleTensors]]:
    """Return the path of the adapter file in a directory, and its tensors for each module of the language model.

    Tensors of image and audio encoders are left out.

    Raises:
        CheckpointError: There is no file, it is damaged, or it holds tensors that no known LoRA adapter has.
        BackendUnavailableError: It is a PyTorch file, and torch is not installed.
    """
    path = next(iter((*adapter_files(directory), *(path for name in FILES if os.path.lexists(path := directory / name)))), None)
    if path is None:
        raise CheckpointError(
            f"{directory} holds neither {' nor '.join(FILES)}: give the directory of a LoRA adapter, or download it again"
        )
    check_regular_file(path)
    tensors = read_tensors(path, "adapter")
    of_texts = {name: one for name, one in tensors.items() if not _is_encoder_tensor(_without_prefix(name))}
    if not of_texts:
        found = "only tensors of image or audio encoders, and texts alone are read" if tensors else "no tensors"
        raise CheckpointError(f"{path} holds {found}: use another adapter")
    nesting = next((one for one in TEXT_MODEL_PREFIXES if any(_without_prefix(name).startswith(one) for name in of_texts)), None)
    entries: dict[tuple[str, bool], ModuleTensors] = {}
    unknown = []
    for name, tensor in of_texts.items():
        parsed = _parse_name(_without_prefix(name))
        if parsed is None:
            unknown.append(name)
            continue
        module, kind, is_embedding = parsed
        plain = module if nesting is None else plain_name(module, nesting)
        entry = entries.setdefault((plain, is_embedding), ModuleTensors(_common_module_name(plain, family), module, is_embedding))
        if kind in entry.tensors:
            raise CheckpointError(f"{path} holds {name} and {entry.tensors[kind][0]}, which are the same: export the adapter again")
        entry.tensors[kind] = (name, tensor)
    if unknown:
        raise CheckpointError(f"{path} holds {name_list(unknown)} that no plain LoRA adapter has: it may compute something else with them")
    return path, list(entries.values())


def adapter_files(directory: Path) -> tuple[Path, ...]:
    """Return the file with an adapter's tensors, as a tuple of at most one path."""
    return tuple(directory / name for name in FILES if is_file(directory / name))[:1]


def as_float32(path: Path, name: str, tensor: FileTensor) -> NDArray[np.float32]:
    """Return a copy of a tensor in float32.

    Raises:
        CheckpointError: The tensor is no float tensor, or a value is not finite.
    """
    if tensor.dtype not in _FLOATS:
        raise CheckpointError(f"{path}: tensor {name} is of type {tensor.dtype}, supported are {', '.join(_FLOATS)}: export it again")
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
    """Return a module's name without the `.base_layer` suffixes of PEFT, one for each parameter of the module that is adapted."""
    while module.endswith(_STACKED):
        module = module.removesuffix(_STACKED)
    return module


def _without_prefix(name: str) -> str:
    return name.removeprefix(_WRAPPER)


def _is_encoder_tensor(name: str) -> bool:
    return name.removeprefix("model.").startswith(ENCODER_PREFIXES)


def _parse_name(name: str) -> tuple[str, TensorRole, bool] | None:
    """Return the module of a tensor, its role, and whether the module is an embedding; None for an unknown name."""
    if (found := _LOW_RANK.fullmatch(name)) is not None:
        module, kind, leaf = found.groups()
        is_embedding = kind.startswith("lora_embedding_")
        own = TensorRole.DOWN if kind.endswith("A") else TensorRole.UP
        if leaf == "bias":
            return None if own is TensorRole.DOWN or is_embedding else (module, TensorRole.UP_BIAS, False)
        return module, own, is_embedding
    if (found := _WHOLE.fullmatch(name)) is not None and ".lora_" not in name:
        return found[1], TensorRole(found[2]), False
    return None


def _common_module_name(module: str, family: Family) -> str:
    """Return a module's name with the experts named as in most families. Of a module with several parameters, one is mapped."""
    plain = without_base_layers(module)
    own = common_expert_name(f"{plain}.weight", family).removesuffix(".weight")
    return own if own != plain else common_expert_name(f"{plain}.down_proj", family).removesuffix(".down_proj")
