"""The matrices of a target that an adapter can change, and which matrices of the network they are."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.models.config import ModelConfig
from paceline.models.families.table import FAMILIES
from paceline.models.layers import ExpertMLP, GatedDeltaConfig, LayerConfig
from paceline.models.storage.fused_matrices import (
    Parts,
    Rows,
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
_HEAD_MATRICES = re.compile(r"\.[kv]_up\.\d+$")  # up-projections of latent attention, which adapters cannot change


@dataclass(frozen=True, slots=True)
class TargetModule:
    """A linear layer of the target that an adapter can change.

    Attributes:
        shape: (N, K) of its weight.
        parts: rows of the weight by name in `Adapter`. A fused weight has several parts, such as q, k and v; None = all rows.
    """

    shape: tuple[int, int]
    parts: Mapping[str, Rows | None]


@dataclass(frozen=True, slots=True)
class ExpertParameter:
    """A parameter that stacks a matrix of all experts of a layer.

    Attributes:
        shape: (N, K) of the matrix of one expert.
        experts: for each expert the rows of its matrix, by name in `Adapter`.
    """

    shape: tuple[int, int]
    experts: tuple[Mapping[str, Rows], ...]


@dataclass(frozen=True, slots=True)
class NetworkMatrix:
    """A matrix of the network that a matrix of `Adapter` changes.

    Attributes:
        name: internal name in `Weights`, without `.weight`.
        rows: rows of the adapter's matrix that belong to it, in the network's order; None = all rows in order.
    """

    name: str
    rows: Rows | None = None

    def select_rows(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the rows of the adapter's matrix or bias that belong to this matrix."""
        return values if self.rows is None else values[self.rows]


def network_matrices(config: ModelConfig) -> dict[str, tuple[NetworkMatrix, ...]]:
    """Return for each matrix of `Adapter` the matrices of the network that it changes: several if checkpoints fuse them in one."""
    shapes, found = tensor_shapes(config), dict[str, tuple[NetworkMatrix, ...]]()
    fused = {
        f"model.layers.{index}.{source}": {f"layers.{index}.{part}": rows for part, rows in parts.items()}
        for index, layer in enumerate(config.layers)
        for source, parts in fused_in_layer(layer, FAMILIES[config.family]).items()
    }
    for module, stems in _matrices_by_module(config).items():
        if module in fused:
            matrices = tuple(NetworkMatrix(stem, rows) for stem, rows in fused[module].items())
        else:
            matrices = tuple(NetworkMatrix(stem, _rotary_row_order(stem, shapes[f"{stem}.weight"][0], config)) for stem in stems)
        found[_name_in_adapter(module, stems)] = matrices
    return {**found, LM_HEAD: (NetworkMatrix("lm_head"),)}


def target_modules(config: ModelConfig) -> dict[str, TargetModule]:
    """Return the linear layers and embeddings that an adapter can change, by checkpoint name without `.weight`."""
    shapes = tensor_shapes(config)
    shapes.setdefault("lm_head.weight", shapes["embedding.weight"])  # an adapter can change lm_head even if embeddings are tied
    by_module = {**_matrices_by_module(config), LM_HEAD: ["lm_head"]}
    sizes = {module: sum(shapes[f"{stem}.weight"][0] for stem in stems) for module, stems in by_module.items()}
    found = {
        module: TargetModule((sizes[module], shapes[f"{stems[0]}.weight"][1]), {_name_in_adapter(module, stems): None})
        for module, stems in by_module.items()
    }
    containing_module = {stem: (module, stems) for module, stems in by_module.items() for stem in stems}
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
        stacks: dict[str, tuple[tuple[int, int], Parts]] = {
            "gate_up_proj" if len(inputs) == 2 else "up_proj": ((len(inputs) * inner, outer), rows),
            "down_proj": ((outer, inner), {"down_proj": slice(0, outer)}),
        }
        prefix = f"model.layers.{index}.{family.module_names.get('experts', 'mlp.experts')}"
        for stack, (shape, parts) in stacks.items():
            experts = tuple(
                {f"{prefix.removeprefix('model.')}.{expert}.{part}": part_rows for part, part_rows in parts.items()}
                for expert in range(layer.mlp.routing.num_experts)
            )
            found[f"{prefix}.{stack}"] = ExpertParameter(shape, experts)
    return found


def _matrices_by_module(config: ModelConfig) -> dict[str, list[str]]:
    """Map each linear module of transformers to our names of the weight matrices in it, without `.weight`."""
    shapes, found = tensor_shapes(config), dict[str, list[str]]()
    for name, stored_name in checkpoint_names(config).items():
        stem, _, kind = name.rpartition(".")
        if stem == "layer_embedding" or stem.rpartition(".")[2] == _CONVOLUTION_MODULE or _HEAD_MATRICES.search(stem):
            continue
        if kind == "weight" and len(shapes[name]) == 2:
            module = stored_name.removesuffix(".weight")
            for stored, loaded in FAMILIES[config.family].loaded_module_names.items():
                module = module.replace(stored, loaded)
            found.setdefault(module, []).append(stem)
    return found


def _name_in_adapter(module: str, stems: list[str]) -> str:
    return EMBEDDING if stems == ["embedding"] else module.removeprefix("model.")


def _fused_modules(layer: LayerConfig, config: ModelConfig) -> dict[str, Parts]:
    """Return the fused matrices that some checkpoints of the family have, with the rows of each part."""
    family, found = FAMILIES[config.family], dict[str, Parts]()
    if isinstance(layer.mixer, GatedDeltaConfig) and not layer.mixer.has_separate_projections:
        found |= {f"{family.recurrent_module}.{source}": parts for source, parts in fused_by_key_head(layer.mixer).items()}
    if family.has_fused_projections:
        found |= fused_projections(layer)
    return found


def _rotary_row_order(stem: str, num_rows: int, config: ModelConfig) -> NDArray[np.int64] | None:
    """Return for each row of a matrix its row in the checkpoint, if loading reorders q and k (`half_split_order`); None = same order."""
    part = stem.rpartition(".")[2]
    if not FAMILIES[config.family].has_interleaved_rope or part not in ("q_proj", "k_proj"):
        return None
    attention = config.layers[int(stem.split(".")[1])].attention
    return half_split_order(num_rows, attention.head_size, attention.rope.rotary_size(attention.head_size))
