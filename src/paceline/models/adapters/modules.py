"""The matrices of a checkpoint that an adapter can change, and the matrices of the network that correspond to them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.models.config import ModelConfig
from paceline.models.families.table import FAMILIES
from paceline.models.layers import ExpertMLP, GatedDeltaConfig, LayerConfig
from paceline.models.storage.fused_matrices import (
    RowsByMatrix,
    RowSelection,
    consecutive_rows,
    fused_by_key_head,
    fused_in_layer,
    fused_projections,
    num_rows,
)
from paceline.models.tensor_names import checkpoint_names, tensor_shapes
from paceline.models.weights import half_split_order

EMBEDDING, LM_HEAD = "embed_tokens", "lm_head"
_CONVOLUTION_MODULE = "conv"
_LATENT_UP_PROJECTION_PATTERN = re.compile(r"\.[kv]_up\.\d+$")  # adapters cannot change these matrices of latent attention


@dataclass(frozen=True, slots=True)
class TargetModule:
    """A linear layer of the target that an adapter can change.

    Attributes:
        shape: (N, K) of its weight.
        rows_by_matrix: rows of the weight that belong to each matrix of `Adapter`, by name; None = all rows. Only a fused weight, such as
            that of q, k and v, holds several matrices.
    """

    shape: tuple[int, int]
    rows_by_matrix: Mapping[str, RowSelection | None]


@dataclass(frozen=True, slots=True)
class ExpertParameter:
    """A parameter that stacks one matrix of every expert of a layer.

    Attributes:
        shape: (N, K) of the matrix of one expert.
        rows_by_expert: for each expert, the rows of its matrix that belong to each matrix of `Adapter`, by name.
    """

    shape: tuple[int, int]
    rows_by_expert: tuple[Mapping[str, RowSelection], ...]


@dataclass(frozen=True, slots=True)
class NetworkMatrix:
    """A matrix of the network that a matrix of `Adapter` changes.

    Attributes:
        name: internal name in `Weights`, without `.weight`.
        lora_b_rows: rows of lora_b, and elements of the bias, that change this matrix, in the network's order; None = all in order.
    """

    name: str
    lora_b_rows: RowSelection | None = None

    def select_rows(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the rows of lora_b, or the elements of a bias, that change this matrix."""
        return values if self.lora_b_rows is None else values[self.lora_b_rows]


def network_matrices(config: ModelConfig) -> dict[str, tuple[NetworkMatrix, ...]]:
    """Return the matrices of the network that each matrix of `Adapter` changes: several if checkpoints fuse them in one."""
    shapes, found = tensor_shapes(config), dict[str, tuple[NetworkMatrix, ...]]()
    fused = {
        f"model.layers.{index}.{source}": {f"layers.{index}.{part}": rows for part, rows in parts.items()}
        for index, layer in enumerate(config.layers)
        for source, parts in fused_in_layer(layer, FAMILIES[config.family]).items()
    }
    for module, names in _matrices_by_module(config).items():
        if module in fused:
            matrices = tuple(NetworkMatrix(name, rows) for name, rows in fused[module].items())
        else:
            matrices = tuple(NetworkMatrix(name, _rotary_row_order(name, shapes[f"{name}.weight"][0], config)) for name in names)
        found[_name_in_adapter(module, names)] = matrices
    return {**found, LM_HEAD: (NetworkMatrix("lm_head"),)}


def target_modules(config: ModelConfig) -> dict[str, TargetModule]:
    """Return the linear layers and embeddings that an adapter can change, by checkpoint name without `.weight`."""
    shapes = tensor_shapes(config)
    shapes.setdefault("lm_head.weight", shapes["embedding.weight"])  # an adapter can change lm_head even if embeddings are tied
    by_module = {**_matrices_by_module(config), LM_HEAD: ["lm_head"]}
    sizes = {module: sum(shapes[f"{name}.weight"][0] for name in names) for module, names in by_module.items()}
    found = {
        module: TargetModule((sizes[module], shapes[f"{names[0]}.weight"][1]), {_name_in_adapter(module, names): None})
        for module, names in by_module.items()
    }
    containing_module = {name: (module, names) for module, names in by_module.items() for name in names}
    for index, layer in enumerate(config.layers):
        for source, parts in _fused_modules(layer, config).items():
            named = {_name_in_adapter(*containing_module[f"layers.{index}.{part}"]): rows for part, rows in parts.items()}
            columns = found[containing_module[f"layers.{index}.{next(iter(parts))}"][0]].shape[1]
            found[f"model.layers.{index}.{source}"] = TargetModule((num_rows(parts), columns), named)
    return found


def expert_parameters(config: ModelConfig) -> dict[str, ExpertParameter]:
    """Return the parameters that stack all experts of a layer, by their names in checkpoints of transformers 5."""
    family, found = FAMILIES[config.family], dict[str, ExpertParameter]()
    for index, layer in enumerate(config.layers):
        if not isinstance(layer.mlp, ExpertMLP):
            continue
        inner, outer = layer.mlp.expert.intermediate_size, layer.mlp.latent_size or config.hidden_size
        inputs = ("gate_proj", "up_proj") if layer.mlp.expert.has_gate else ("up_proj",)
        rows = consecutive_rows(dict.fromkeys(inputs, inner))
        if family.has_mxfp4_experts:
            rows = {part: slice(number, 2 * inner, 2) for number, part in enumerate(inputs)}
        parameters: dict[str, tuple[tuple[int, int], RowsByMatrix]] = {
            "gate_up_proj" if len(inputs) == 2 else "up_proj": ((len(inputs) * inner, outer), rows),
            "down_proj": ((outer, inner), {"down_proj": slice(0, outer)}),
        }
        prefix = f"model.layers.{index}.{family.module_names.get('experts', 'mlp.experts')}"
        for parameter_name, (shape, parts) in parameters.items():
            experts = tuple(
                {f"{prefix.removeprefix('model.')}.{expert}.{part}": part_rows for part, part_rows in parts.items()}
                for expert in range(layer.mlp.routing.num_experts)
            )
            found[f"{prefix}.{parameter_name}"] = ExpertParameter(shape, experts)
    return found


def _matrices_by_module(config: ModelConfig) -> dict[str, list[str]]:
    """Map each linear module of transformers to the internal names, without `.weight`, of the weight matrices in it."""
    shapes, found = tensor_shapes(config), dict[str, list[str]]()
    for tensor_name, stored_name in checkpoint_names(config).items():
        name, _, kind = tensor_name.rpartition(".")
        if name == "layer_embedding" or name.rpartition(".")[2] == _CONVOLUTION_MODULE or _LATENT_UP_PROJECTION_PATTERN.search(name):
            continue
        if kind == "weight" and len(shapes[tensor_name]) == 2:
            module = stored_name.removesuffix(".weight")
            for stored, loaded in FAMILIES[config.family].loaded_module_names.items():
                module = module.replace(stored, loaded)
            found.setdefault(module, []).append(name)
    return found


def _name_in_adapter(module: str, names: list[str]) -> str:
    return EMBEDDING if names == ["embedding"] else module.removeprefix("model.")


def _fused_modules(layer: LayerConfig, config: ModelConfig) -> dict[str, RowsByMatrix]:
    """Return the fused matrices that checkpoints of the family may have, by module name, with the row range of each part."""
    family, found = FAMILIES[config.family], dict[str, RowsByMatrix]()
    if isinstance(layer.mixer, GatedDeltaConfig) and not layer.mixer.has_separate_qkv_projections:
        found |= {f"{family.recurrent_module}.{source}": parts for source, parts in fused_by_key_head(layer.mixer).items()}
    if family.has_fused_projections:
        found |= fused_projections(layer)
    return found


def _rotary_row_order(name: str, num_rows: int, config: ModelConfig) -> NDArray[np.int64] | None:
    """Return the checkpoint's row for each row of a q or k matrix that loading reorders; None = the same order."""
    part = name.rpartition(".")[2]
    if not FAMILIES[config.family].has_interleaved_rope or part not in ("q_proj", "k_proj"):
        return None
    attention = config.layers[int(name.split(".")[1])].attention
    return half_split_order(num_rows, attention.head_size, attention.rope.rotary_size(attention.head_size))
