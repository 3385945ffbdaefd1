"""The matrices of a target that adapters name, and which products of the network each of them holds."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.models.config import ModelConfig
from paceline.models.families import FAMILIES
from paceline.models.joined_products import Parts, Rows, gated_delta_by_key_head, joined_in_layer, num_rows, one_after_another
from paceline.models.layers import DenseMLP, ExpertMLP, GatedDeltaConfig, LayerConfig
from paceline.models.tensor_names import checkpoint_names, tensor_shapes
from paceline.models.weights import order_of_halves

EMBEDDING, LM_HEAD = "embed_tokens", "lm_head"
_OF_CONVOLUTIONS = "conv"


@dataclass(frozen=True, slots=True)
class Module:
    """A matrix [N, K] as adapters name it.

    Attributes:
        parts: the products in it, by the names of `Adapter`, with their rows in our order; None = all, as they are.
    """

    shape: tuple[int, int]
    parts: Mapping[str, Rows | None]


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices [N, K] of the experts of a layer, which models hold as one parameter.

    Attributes:
        experts: of each expert, as the parts of a `Module`.
    """

    shape: tuple[int, int]
    experts: tuple[Mapping[str, Rows], ...]


def product_names(config: ModelConfig) -> dict[str, str]:
    """Every product that an adapter may add to: the name of its weight in `Weights` without `.weight` → its name in `Adapter`.

    That is the checkpoint's name of the matrix; ours, where several products lie in one matrix and this is not the one that has its name.
    """
    by_module, names = _by_module(config), {}
    for module, stems in by_module.items():
        for stem in stems:
            is_its_own = len(stems) == 1 or stem.rpartition(".")[2] == module.rpartition(".")[2]
            names[stem] = module.removeprefix("model.") if is_its_own else stem
    return {**names, "embedding": EMBEDDING, "lm_head": LM_HEAD}


def modules_of(config: ModelConfig) -> dict[str, Module]:
    """The matrices that an adapter may name, by the names of Hugging Face checkpoints without `.weight`."""
    shapes, names = tensor_shapes(config), product_names(config)
    shapes.setdefault("lm_head.weight", shapes["embedding.weight"])  # a head of its own, once an adapter changes one of the two
    found: dict[str, Module] = {}
    for module, stems in {**_by_module(config), LM_HEAD: ["lm_head"]}.items():
        if len(stems) == 1:
            rows, columns = shapes[f"{stems[0]}.weight"]
            found[module] = Module((rows, columns), {names[stems[0]]: _order(stems[0], rows, config)})
    for index, layer in enumerate(config.layers):
        for source, parts in _joined(layer, config).items():
            joined = {f"layers.{index}.{part}": rows for part, rows in parts.items()}
            columns = shapes[f"{next(iter(joined))}.weight"][1]
            ordered = {names[stem]: _in_order(stem, own, config) for stem, own in joined.items()}
            found[f"model.layers.{index}.{source}"] = Module((num_rows(parts), columns), ordered)
    return found


def stacks_of(config: ModelConfig) -> dict[str, Stack]:
    """The parameters that hold all experts of a layer, by their names in checkpoints of transformers 5."""
    names, family, found = product_names(config), FAMILIES[config.family], {}
    for index, layer in enumerate(config.layers):
        if not isinstance(layer.mlp, ExpertMLP):
            continue
        inner, outer = layer.mlp.expert.intermediate_size, layer.mlp.latent_size or config.hidden_size
        front = ("gate_proj", "up_proj") if layer.mlp.expert.has_gate else ("up_proj",)
        rows = one_after_another(dict.fromkeys(front, inner))
        if family.packs_experts:
            rows = {part: slice(number, 2 * inner, 2) for number, part in enumerate(front)}
        stacks: dict[str, tuple[tuple[int, int], Parts]] = {
            "gate_up_proj" if len(front) == 2 else "up_proj": ((len(front) * inner, outer), rows),
            "down_proj": ((outer, inner), {"down_proj": slice(0, outer)}),
        }
        prefix = f"model.layers.{index}.{family.part_names.get('experts', 'mlp.experts')}"
        for stack, (shape, parts) in stacks.items():
            experts = tuple(
                {names[f"layers.{index}.experts.{expert}.{part}"]: own for part, own in parts.items()}
                for expert in range(layer.mlp.routing.num_experts)
            )
            found[f"{prefix}.{stack}"] = Stack(shape, experts)
    return found


def _by_module(config: ModelConfig) -> dict[str, list[str]]:
    """Matrices in checkpoints, and ours in each."""
    shapes, found = tensor_shapes(config), dict[str, list[str]]()
    for ours, theirs in checkpoint_names(config).items():
        stem, _, kind = ours.rpartition(".")
        if kind == "weight" and len(shapes[ours]) == 2 and stem != "layer_embedding" and stem.rpartition(".")[2] != _OF_CONVOLUTIONS:
            found.setdefault(theirs.removesuffix(".weight"), []).append(stem)
    return found


def _joined(layer: LayerConfig, config: ModelConfig) -> dict[str, Parts]:
    """Matrices of a layer that hold several products."""
    family = FAMILIES[config.family]
    found = joined_in_layer(layer, family)
    if isinstance(layer.mixer, GatedDeltaConfig):
        found |= {f"{family.recurrent_part}.{source}": parts for source, parts in gated_delta_by_key_head(layer.mixer).items()}
    if family.fuses_projections:
        attention = layer.attention
        sizes = {"q_proj": attention.query_size, "k_proj": attention.kv_size, "v_proj": attention.kv_size}
        found["self_attn.qkv_proj"] = one_after_another(sizes)
        if isinstance(layer.mlp, DenseMLP):
            found["mlp.gate_up_proj"] = one_after_another(dict.fromkeys(("gate_proj", "up_proj"), layer.mlp.intermediate_size))
    return found


def _order(stem: str, rows: int, config: ModelConfig) -> NDArray[np.int64] | None:
    """Which row of the checkpoint each of ours is; None = the same."""
    part = stem.rpartition(".")[2]
    if not FAMILIES[config.family].interleaves_rotation or part not in ("q_proj", "k_proj"):
        return None
    attention = config.layers[int(stem.split(".")[1])].attention
    return order_of_halves(rows, attention.head_size, attention.rope.rotary_size(attention.head_size))


def _in_order(stem: str, rows: Rows, config: ModelConfig) -> Rows:
    """Rows of a joined matrix in our order."""
    count = num_rows({stem: rows})
    order = _order(stem, count, config)
    if order is None:
        return rows
    return (np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows)[order]
