"""Fused matrices of checkpoints: the rows that belong to each matrix of the network, such as q, k and v."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from paceline.models.families.family import Family
from paceline.models.layers import (
    AttentionConfig,
    AttentionGate,
    DenseMLP,
    ExpertMLP,
    GatedDeltaConfig,
    LatentProjections,
    LayerConfig,
    Mamba2Config,
    Recurrent,
)
from paceline.models.weights import half_split_order

RowSelection = slice | NDArray[np.int64]  # a range of matrix rows, or their indices
RowsByMatrix = Mapping[str, RowSelection]


def fused_in_layer(layer: LayerConfig, family: Family) -> dict[str, RowsByMatrix]:
    """Return the fused matrices of a layer by checkpoint name, with the rows of each part. `fused_projections` are not included."""
    mixers = (item for mixer in layer.mixers for item in _fused_matrices_of_mixer(mixer, family).items())
    return {**dict(mixers), **_fused_in_mlp(layer.mlp, family)}


def fused_projections(layer: LayerConfig) -> dict[str, dict[str, slice]]:
    """Return the rows of q, k and v in their fused matrix, and of gate and up in theirs. Not all families fuse these."""
    attention = layer.attention
    found = {
        "self_attn.qkv_proj": consecutive_rows({"q_proj": attention.query_size, "k_proj": attention.kv_size, "v_proj": attention.kv_size})
    }
    if isinstance(layer.mlp, DenseMLP) and layer.mlp.has_gate:
        found["mlp.gate_up_proj"] = consecutive_rows(dict.fromkeys(("gate_proj", "up_proj"), layer.mlp.intermediate_size))
    return found


def fused_by_key_head(mixer: GatedDeltaConfig) -> dict[str, RowsByMatrix]:
    """Return Qwen3-Next's two fused matrices, whose rows are ordered by key head: q, k, v and z are in one, b and a in the other."""
    count = mixer.num_key_heads
    values = mixer.num_value_heads // count * mixer.value_size
    heads = np.arange(2 * mixer.state_shape.key_width + 2 * mixer.state_shape.value_width).reshape(count, -1)
    q, k, v, z = np.split(heads, np.cumsum([mixer.key_size, mixer.key_size, values]), axis=1)
    b, a = np.split(np.arange(2 * mixer.num_value_heads).reshape(count, -1), 2, axis=1)
    return {
        "in_proj_qkvz": {"conv_proj": np.concatenate([part.reshape(-1) for part in (q, k, v)]), "z_proj": z.reshape(-1)},
        "in_proj_ba": {"b_proj": b.reshape(-1), "a_proj": a.reshape(-1)},
    }


def is_transposed(part: str) -> bool:
    """Return whether a part of a fused matrix is transposed in the network."""
    return part.startswith("k_up.")


def num_rows(parts: RowsByMatrix) -> int:
    """Return the number of rows of a fused matrix."""
    return sum(rows.stop - rows.start if isinstance(rows, slice) else len(rows) for rows in parts.values())


def consecutive_rows(sizes: Mapping[str, int]) -> dict[str, slice]:
    """Return the row range of each part of a matrix whose parts are stored one after another. `sizes`: number of rows of each part."""
    ends = np.cumsum(list(sizes.values())).tolist()
    return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}


def _fused_matrices_of_mixer(mixer: AttentionConfig | Recurrent, family: Family) -> dict[str, RowsByMatrix]:
    if isinstance(mixer, GatedDeltaConfig):
        return {}
    if isinstance(mixer, AttentionConfig):
        if mixer.latent is not None:
            return _fused_matrices_of_latent_attention(mixer, mixer.latent)
        if mixer.gate is not AttentionGate.VALUE or "attention_gate" in family.module_names:  # no gate, or a separate matrix
            return {}
        heads = np.arange(2 * mixer.query_size).reshape(mixer.num_heads, 2, mixer.head_size)
        return {"self_attn.q_proj": {"q_proj": heads[:, 0].reshape(-1), "attention_gate": heads[:, 1].reshape(-1)}}
    if isinstance(mixer, Mamba2Config):
        sizes = {"z_proj": mixer.state_shape.value_width, "conv_proj": mixer.channels, "dt_proj": mixer.state_shape.num_heads}
    else:
        sizes = dict.fromkeys(("b_proj", "c_proj", "conv_proj"), mixer.channels)
    return {f"{family.recurrent_module}.in_proj": consecutive_rows(sizes)}


def _fused_matrices_of_latent_attention(mixer: AttentionConfig, latent: LatentProjections) -> dict[str, RowsByMatrix]:
    """Return the fused matrices of multi-head latent attention, with the rows of each part.

    Rotary pairs, which are interleaved in checkpoints, become (j, j + rotary_size / 2). The network transposes `k_up.{head}`.
    """
    size, rope, rank = latent.unrotated_size, latent.rope_size, mixer.latent_size
    queries = np.arange(mixer.num_heads * (size + rope)).reshape(mixer.num_heads, -1)
    rotated = queries[:, size:].reshape(-1)
    up = np.arange(mixer.num_heads * (size + latent.value_size)).reshape(mixer.num_heads, -1)
    return {
        f"self_attn.{'q_b_proj' if latent.query_rank else 'q_proj'}": {
            "q_proj": queries[:, :size].reshape(-1),
            "q_rope_proj": rotated[half_split_order(len(rotated), rope, rope)],
        },
        "self_attn.kv_a_proj_with_mqa": {"kv_a_proj": slice(0, rank), "k_rope_proj": rank + half_split_order(rope, rope, rope)},
        "self_attn.kv_b_proj": {
            **{f"v_up.{head}": rows[size:] for head, rows in enumerate(up)},
            **{f"k_up.{head}": rows[:size] for head, rows in enumerate(up)},
        },
    }


def _fused_in_mlp(mlp: DenseMLP | ExpertMLP | None, family: Family) -> dict[str, RowsByMatrix]:
    """Return the fused matrix of gate and up of a dense MLP or shared expert if the family's checkpoints have such a matrix."""
    names, dense = family.module_names, mlp.shared_expert if isinstance(mlp, ExpertMLP) else mlp
    if dense is None or "gate_proj" not in names or names["gate_proj"] != names["up_proj"]:
        return {}
    prefix = "" if dense is mlp else "shared_expert."
    return {names["gate_proj"]: consecutive_rows(dict.fromkeys((f"{prefix}gate_proj", f"{prefix}up_proj"), dense.intermediate_size))}
