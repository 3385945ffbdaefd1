"""Split tensors that stack all experts of a layer into one tensor for each expert, without copying bytes."""

import re
from collections.abc import Mapping

from paceline.errors import CheckpointError
from paceline.models.config import ModelConfig
from paceline.models.families.family import Family
from paceline.models.families.table import FAMILIES
from paceline.models.layers import ExpertMLP
from paceline.models.quantized_formats.module import StoredWeight
from paceline.models.storage.safetensors_file import StoredTensor

_EXPERT_TENSOR_NAME_PATTERN = re.compile(r"(model\.layers\.\d+)\.(\w+)\.(?:(experts\.\d+\.)(w1|w2|w3)\.weight|(.+))")
_MIXTRAL_MATRIX_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_STACK_NAMES = {"experts.gate_up_proj": "experts.gate_up_proj", "experts.down_proj": "experts.down_proj"}


def split_experts(stored: Mapping[str, StoredWeight], config: ModelConfig) -> dict[str, StoredWeight]:
    """Split stacked tensors into one tensor for each expert, such as `model.layers.0.mlp.experts.7.gate_proj.weight`.

    Raises:
        CheckpointError: The shape of a stacked tensor differs from what config.json requires.
    """
    family = FAMILIES[config.family]
    tensors = {standard_expert_name(name, family): tensor for name, tensor in stored.items()}
    for index, layer in enumerate(config.layers):
        if not isinstance(layer.mlp, ExpertMLP):
            continue
        prefix = f"model.layers.{index}.{family.module_names.get('experts', 'mlp.experts')}."
        gate_up = ("gate_up_proj", ("gate_proj", "up_proj")) if layer.mlp.expert.has_gate else ("up_proj", ("up_proj",))
        for stack, parts in (gate_up, ("down_proj", ("down_proj",))):
            tensor = tensors.get(prefix + stack)
            if isinstance(tensor, StoredTensor):
                del tensors[prefix + stack]
                tensors |= _split_stack(prefix + stack, tensor, layer.mlp, config.hidden_size, parts)
    return tensors


def standard_expert_name(name: str, family: Family) -> str:
    """Return the name that most families use for an expert's tensor; other names are returned unchanged."""
    match = _EXPERT_TENSOR_NAME_PATTERN.fullmatch(name)
    if match is None or match[2] != family.mlp_module:
        return name
    prefix, _, expert, part, other = match.groups()
    standard = {**_STACK_NAMES, **family.mlp_tensors}.get(other) if expert is None else f"{expert}{_MIXTRAL_MATRIX_NAMES[part]}.weight"
    return name if standard is None else f"{prefix}.mlp.{standard}"


def _split_stack(name: str, tensor: StoredTensor, mlp: ExpertMLP, hidden_size: int, parts: tuple[str, ...]) -> dict[str, StoredTensor]:
    inner, outer, count = mlp.expert.intermediate_size, mlp.latent_size or hidden_size, mlp.routing.num_experts
    rows, columns = (outer, inner) if parts == ("down_proj",) else (inner, outer)
    if tensor.shape != (count, len(parts) * rows, columns):
        raise CheckpointError(
            f"{tensor.path}: tensor {name!r} has shape {list(tensor.shape)}, but config.json requires "
            f"{[count, len(parts) * rows, columns]}; one of the two files belongs to another model"
        )
    num_bytes = (tensor.end - tensor.begin) // (count * len(parts))
    prefix, found = name.rpartition(".")[0], {}
    for number in range(count * len(parts)):
        begin = tensor.begin + number * num_bytes
        expert_name = f"{prefix}.{number // len(parts)}.{parts[number % len(parts)]}.weight"
        found[expert_name] = StoredTensor(tensor.path, tensor.dtype, (rows, columns), begin, begin + num_bytes)
    return found
