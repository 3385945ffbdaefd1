"""An adapter under our own names, with its rows in the order in which the network has them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.models.adapters.adapter import Adapter, LowRank
from paceline.models.config import ModelConfig
from paceline.models.families import FAMILIES
from paceline.models.layers import AttentionConfig
from paceline.models.tensor_names import checkpoint_names, tensor_shapes
from paceline.models.weights import order_of_halves

EMBEDDING, LM_HEAD = "embedding", "lm_head"
_TABLES = ("layer_embedding",)  # of which rows are looked up somewhere else
_MOST_NAMES = 8  # in an error
_KEPT_APART = {"embed_tokens": EMBEDDING, "lm_head": LM_HEAD}


@dataclass(frozen=True, slots=True)
class PlacedAdapter:
    """What an adapter does, by our names without `.weight`; the vocabulary matrix is `lm_head`, even if the embedding serves for it.

    Attributes:
        products, biases, saved: as in `Adapter`.
    """

    products: Mapping[str, LowRank]
    biases: Mapping[str, NDArray[np.float32]]
    saved: Mapping[str, NDArray[np.float32]]

    @property
    def changes_embedding(self) -> bool:
        return EMBEDDING in self.products or EMBEDDING in self.saved

    def embedding_rows(self, rows: NDArray[np.float32], token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Rows [T, E] of the embedding, not scaled yet, as the adapter has them: each by itself, in the order of the ranks.

        Args:
            rows: the target's own.
        """
        if EMBEDDING in self.saved:
            return self.saved[EMBEDDING][token_ids]
        low = self.products.get(EMBEDDING)
        if low is None:
            return rows
        added = np.zeros_like(rows)
        for down, up in zip(low.down, low.up.T, strict=True):
            added += down[token_ids, None] * up
        return rows + added


def placed(adapter: Adapter, config: ModelConfig, *, in_experts: bool = False) -> PlacedAdapter:
    """An adapter as the network of `config` takes it.

    Args:
        in_experts: whether experts can be changed.

    Raises:
        ConfigError: it changes what cannot be changed, or has another shape than that; every name is listed.
    """
    ours = _our_names(config, in_experts=in_experts)
    named = {*adapter.products, *adapter.biases}
    unknown = sorted({name for name in named if name not in ours} | {name for name in adapter.saved if name not in _KEPT_APART})
    unknown += sorted(name for name in adapter.saved if name in named)
    if unknown:
        shown = ", ".join(unknown[:_MOST_NAMES]) + (f" and {len(unknown) - _MOST_NAMES} more" if len(unknown) > _MOST_NAMES else "")
        raise ConfigError(
            f"the adapter {adapter.name!r} changes {shown}, which no adapter can change here: use one for attention, dense MLPs, embedding "
            "and lm_head alone, or merge it into the checkpoint"
        )
    products = {own: LowRank(low.down, _rows(low.up, own, config)) for name, low in adapter.products.items() for own in ours[name]}
    biases = {own: _rows(bias, own, config) for name, bias in adapter.biases.items() for own in ours[name]}
    found = PlacedAdapter(products, biases, {_KEPT_APART[name]: values for name, values in adapter.saved.items()})
    _check_shapes(adapter.name, found, config)
    return found


def _our_names(config: ModelConfig, *, in_experts: bool) -> dict[str, list[str]]:
    """Ours by the checkpoint's: several where one matrix there holds several of ours."""
    shapes, ours = tensor_shapes(config), dict[str, list[str]]()
    for name, in_file in checkpoint_names(config).items():
        part, kind = name.rsplit(".", 1)
        if kind != "weight" or len(shapes[name]) != 2 or part in _TABLES or (".experts." in part and not in_experts):
            continue
        if part.startswith("layers.") and _is_recurrent(part, config):
            continue
        ours.setdefault(in_file.removeprefix("model.").removesuffix(".weight"), []).append(part)
    return {"lm_head": [LM_HEAD], **ours}


def _is_recurrent(part: str, config: ModelConfig) -> bool:
    """Whether it is of a mixer whose matrices are cut from others."""
    _, layer, *path = part.split(".")
    mixer = config.layers[int(layer)].mixer
    of_mixer = path[-1] in ("conv", "conv_proj", "z_proj", "a_proj", "b_proj", "c_proj", "dt_proj", "o_proj")
    return of_mixer and mixer is not None and not isinstance(mixer, AttentionConfig)


def _rows(values: NDArray[np.float32], name: str, config: ModelConfig) -> NDArray[np.float32]:
    """Rows of a checkpoint's matrix that are those of ours, in our order."""
    if not name.startswith("layers."):
        return values
    _, layer, *path = name.split(".")
    mixer = config.layers[int(layer)].mixer
    if not isinstance(mixer, AttentionConfig) or path[0] not in ("q_proj", "k_proj", "attention_gate"):
        return values
    if mixer.is_gated and path[0] != "k_proj":  # each head's query and then its gate
        heads = values.reshape(mixer.num_heads, 2, mixer.head_size, -1) if len(values) == 2 * mixer.query_size else None
        values = values if heads is None else heads[:, int(path[0] == "attention_gate")].reshape(mixer.query_size, *values.shape[1:])
    if not FAMILIES[config.family].interleaves_rotation or path[0] == "attention_gate" or len(values) % mixer.head_size:
        return values
    return values[order_of_halves(len(values), mixer.head_size, mixer.rope.rotary_size(mixer.head_size))]


def _check_shapes(adapter: str, found: PlacedAdapter, config: ModelConfig) -> None:
    shapes = {name.removesuffix(".weight"): shape for name, shape in tensor_shapes(config).items() if name.endswith(".weight")}
    shapes[LM_HEAD] = shapes[EMBEDDING]
    wrong = []
    for name, low in found.products.items():
        outputs, columns = shapes[name][::-1] if name == EMBEDDING else shapes[name]
        if low.up.shape != (outputs, len(low.down)) or low.down.shape != (len(low.down), columns):
            wrong.append(f"{name} as {list(low.up.shape)} x {list(low.down.shape)}, the target has {[outputs, columns]}")
    wrong += [f"the bias of {name}" for name, bias in found.biases.items() if bias.shape != shapes[name][:1]]
    wrong += [f"{name} of shape {list(values.shape)}" for name, values in found.saved.items() if values.shape != shapes[name]]
    if wrong:
        raise ConfigError(f"the adapter {adapter!r} is another model's: {'; '.join(wrong[:_MOST_NAMES])}")
