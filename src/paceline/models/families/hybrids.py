"""Layer types and recurrent mixers of families that mix attention layers with recurrent layers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import CheckpointError, shortened
from paceline.models.families.family import Layers
from paceline.models.gguf.fields import MTP_TENSOR_NAME, GgufFields
from paceline.models.json_fields import MAX_FLOAT32, JsonFields
from paceline.models.layer_builder import MAX_HEAD_SIZE, LayerBuilder
from paceline.models.layers import (
    Activation,
    AttentionConfig,
    DenseMLP,
    ExpertMLP,
    GatedDeltaConfig,
    LayerConfig,
    Mamba2Config,
    Recurrent,
    share_equal_layers,
)

Mixer = AttentionConfig | Recurrent
AnyMLP = DenseMLP | ExpertMLP

SILU_ACTIVATIONS = {"silu": Activation.SILU, "swish": Activation.SILU}
"""Supported activations, by their names in config.json, of families in which one field sets the activation of MLPs and convolutions."""
MAMBA_METADATA_KEYS = {
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_d_head": "ssm.inner_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
}
"""Metadata keys of the config.json fields of Mamba-2 mixers."""
MAX_RECURRENT_HEADS = 4096
MAX_CONV_KERNEL_SIZE = 16


def mixed_layers(
    builder: LayerBuilder,
    mixers: Mapping[str, Mixer],
    mlps: Sequence[AnyMLP],
    *,
    default_types: Sequence[str],
    **settings: Any,
) -> Layers:
    """Return layers with one of `mixers` for each name in config.json's `layer_types`, or in `default_types` if it is absent.

    Args:
        settings: further settings of `LayerConfig`, equal in all layers.

    Raises:
        CheckpointError: `layer_types` has a wrong length, an unknown name, or no attention layer.
    """
    fields, listed = builder.fields, builder.fields.values.get("layer_types")
    listed = list(default_types) if listed is None else listed
    if not isinstance(listed, list) or len(listed) != builder.num_layers:
        count = f"{len(listed)} layers" if isinstance(listed, list) else shortened(listed)
        raise CheckpointError(f"{fields.path}: layer_types names {count}, but num_hidden_layers = {builder.num_layers}")
    for kind in listed:
        if not isinstance(kind, str) or kind not in mixers:
            raise CheckpointError(
                f"{fields.path}: layer_types names {shortened(kind)}, which is not supported for {builder.family.name}; "
                f"supported are {', '.join(mixers)}"
            )
    if not any(isinstance(mixers[kind], AttentionConfig) for kind in listed):
        raise CheckpointError(f"{fields.path}: layer_types has no layer with attention: at least one is needed")
    return share_equal_layers(LayerConfig(mixer=mixers[kind], mlp=mlp, **settings) for kind, mlp in zip(listed, mlps, strict=True))


def delta_net_mixer(fields: JsonFields) -> GatedDeltaConfig:
    key_heads, value_heads = (fields.integer(f"linear_num_{part}_heads", maximum=MAX_RECURRENT_HEADS) for part in ("key", "value"))
    if value_heads % key_heads:
        raise CheckpointError(
            f"{fields.path}: linear_num_value_heads = {value_heads} must be a multiple of linear_num_key_heads = {key_heads}"
        )
    return GatedDeltaConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_size=fields.integer("linear_key_head_dim", maximum=MAX_HEAD_SIZE),
        value_size=fields.integer("linear_value_head_dim", maximum=MAX_HEAD_SIZE),
        kernel_size=fields.integer("linear_conv_kernel_dim", maximum=MAX_CONV_KERNEL_SIZE),
    )


def mamba_mixer(builder: LayerBuilder, *, head_size: int, bias: bool) -> Mamba2Config:
    fields = builder.fields
    heads, groups = (fields.integer(name, maximum=MAX_RECURRENT_HEADS) for name in ("mamba_n_heads", "mamba_n_groups"))
    if heads % groups:
        raise CheckpointError(f"{fields.path}: mamba_n_heads = {heads} must be a multiple of mamba_n_groups = {groups}")
    return Mamba2Config(
        num_heads=heads,
        head_size=head_size,
        num_groups=groups,
        state_size=fields.integer("mamba_d_state", maximum=MAX_HEAD_SIZE),
        kernel_size=fields.integer("mamba_d_conv", maximum=MAX_CONV_KERNEL_SIZE),
        norm_groups=groups,
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        bias=bias,
        dt_limits=_read_dt_limits(fields),
    )


def mamba_mixer_of_width(builder: LayerBuilder, width: int, width_name: str, *, bias: bool) -> Mamba2Config:
    """Return the Mamba-2 mixer of Granite 4 and Falcon-H1. All heads together have `width` values.

    Args:
        width_name: the field or product of fields in config.json that gives `width`, for errors.
    """
    fields = builder.fields
    heads, given = fields.integer("mamba_n_heads", maximum=MAX_RECURRENT_HEADS), fields.values.get("mamba_d_head")
    size = max(width // heads, 1) if given in (None, "auto") else fields.integer("mamba_d_head", maximum=MAX_HEAD_SIZE)
    if heads * size != width:
        raise CheckpointError(
            f"{fields.path}: mamba_n_heads = {heads} times mamba_d_head = {shortened(given)} must be {width_name} = {width}"
        )
    return mamba_mixer(builder, head_size=size, bias=bias)


def _read_dt_limits(fields: JsonFields) -> tuple[float, float]:
    """Return the two numbers of `time_step_limit`. transformers writes infinity as {"__float__": "Infinity"}."""
    given = fields.values.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    limits = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in given] if isinstance(given, list) else []
    if len(limits) != 2 or any(isinstance(limit, bool) or not isinstance(limit, int | float) for limit in limits):
        raise CheckpointError(f"{fields.path}: time_step_limit = {shortened(given)}, expected two numbers")
    low, high = (float(limit) for limit in limits)
    if not 0.0 <= low < high or low > MAX_FLOAT32:
        raise CheckpointError(f"{fields.path}: time_step_limit = {shortened(given)}, expected a number of 0 or more and a larger one")
    return low, high


def gguf_layer_count(fields: GgufFields, num_blocks: int) -> int:
    """Return the number of layers. `block_count` may include MTP modules after the last layer, which are subtracted."""
    mtp_blocks = [block for block in range(num_blocks) if fields.has_tensor(f"blk.{block}.{MTP_TENSOR_NAME}")]
    return fields.num_layers_without_mtp(num_blocks, num_blocks - mtp_blocks[0] if mtp_blocks else 0)


def layers_with_attention(fields: GgufFields, num_layers: int) -> list[bool]:
    """Return for each layer whether it has attention: its number of KV heads in the metadata is not 0."""
    counts = fields.architecture_value("attention.head_count_kv")
    if not isinstance(counts, list) or len(counts) < num_layers:  # the list may be longer, because it may include MTP modules
        fields.raise_invalid("attention.head_count_kv", counts, f"a number for each of {num_layers} layers, 0 for those without attention")
    return [count != 0 for count in counts[:num_layers]]


def mamba_gguf_fields(fields: GgufFields, num_layers: int) -> dict[str, Any]:
    num_heads, inner = fields.count("ssm.time_step_rank"), fields.count("ssm.inner_size")
    if inner % num_heads:
        fields.raise_invalid("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank, {num_heads}")
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": inner // num_heads,
        "mamba_d_state": fields.count("ssm.state_size"),
        "mamba_n_groups": fields.count("ssm.group_count"),
        "mamba_d_conv": fields.count("ssm.conv_kernel"),
        "mamba_conv_bias": fields.has_in_any_block("ssm_conv1d.bias", num_layers),
        "mamba_proj_bias": fields.has_in_any_block("ssm_in.bias", num_layers),
    }
