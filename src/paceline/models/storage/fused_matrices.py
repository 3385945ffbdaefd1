"""Matrices of a checkpoint that hold the rows of several matrices of the network, such as q, k and v."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from paceline.models.families.family import Family
from paceline.models.layers import AttentionConfig, DenseMLP, ExpertMLP, GatedDeltaConfig, LayerConfig, Mamba2Config, Recurrent

Rows = slice | NDArray[np.int64]
Parts = Mapping[str, Rows]


def fused_in_layer(layer: LayerConfig, family: Family) -> dict[str, Parts]:
    """Return the fused matrices of a hybrid's layer by names such as `self_attn.q_proj`, with the rows of each matrix of the network."""
    return {**_fused_in_mixer(layer.mixer, family), **_fused_in_mlp(layer.mlp, family)}


def fused_by_key_head(mixer: GatedDeltaConfig) -> dict[str, Parts]:
    """Return fused matrices with rows ordered by key head: its query, key, values and gates; its b and a."""
    count, group = mixer.num_key_heads, mixer.num_value_heads // mixer.num_key_heads
    values = group * mixer.value_size
    heads = np.arange(2 * mixer.state.key_width + 2 * mixer.state.value_width).reshape(count, -1)
    q, k, v, z = np.split(heads, np.cumsum([mixer.key_size, mixer.key_size, values]), axis=1)
    b, a = np.split(np.arange(2 * mixer.num_value_heads).reshape(count, -1), 2, axis=1)
    return {
        "in_proj_qkvz": {"conv_proj": np.concatenate([part.reshape(-1) for part in (q, k, v)]), "z_proj": z.reshape(-1)},
        "in_proj_ba": {"b_proj": b.reshape(-1), "a_proj": a.reshape(-1)},
    }


def num_rows(parts: Parts) -> int:
    """Return the number of rows of the whole fused matrix."""
    return sum(rows.stop - rows.start if isinstance(rows, slice) else len(rows) for rows in parts.values())


def consecutive_rows(sizes: Mapping[str, int]) -> dict[str, Rows]:
    """Return consecutive row ranges of these sizes."""
    ends = np.cumsum(list(sizes.values())).tolist()
    return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}


def _fused_in_mixer(mixer: AttentionConfig | Recurrent | None, family: Family) -> dict[str, Parts]:
    if mixer is None or isinstance(mixer, GatedDeltaConfig):
        return {}
    if isinstance(mixer, AttentionConfig):
        if not mixer.is_gated:
            return {}
        heads = np.arange(2 * mixer.query_size).reshape(mixer.num_heads, 2, mixer.head_size)
        return {"self_attn.q_proj": {"q_proj": heads[:, 0].reshape(-1), "attention_gate": heads[:, 1].reshape(-1)}}
    if isinstance(mixer, Mamba2Config):
        sizes = {"z_proj": mixer.state.value_width, "conv_proj": mixer.channels, "dt_proj": mixer.state.heads}
    else:
        sizes = dict.fromkeys(("b_proj", "c_proj", "conv_proj"), mixer.channels)
    return {f"{family.recurrent_module}.in_proj": consecutive_rows(sizes)}


def _fused_in_mlp(mlp: DenseMLP | ExpertMLP | None, family: Family) -> dict[str, Parts]:
    """Return the fused gate and up of the dense or shared MLP, if the family has one matrix for both."""
    names, dense = family.module_names, mlp.shared if isinstance(mlp, ExpertMLP) else mlp
    if dense is None or "gate_proj" not in names or names["gate_proj"] != names["up_proj"]:
        return {}
    prefix = "" if dense is mlp else "shared_expert."
    return {names["gate_proj"]: consecutive_rows(dict.fromkeys((f"{prefix}gate_proj", f"{prefix}up_proj"), dense.intermediate_size))}
