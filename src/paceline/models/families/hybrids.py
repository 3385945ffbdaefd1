"""Layers of hybrids, which several families share: layers of mixed types, and the Mamba-2 mixer."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import CheckpointError, shortened
from paceline.models.gguf.fields import MTP_TENSOR, GgufFields
from paceline.models.json_fields import LARGEST, JsonFields
from paceline.models.layer_builder import MAX_HEAD_SIZE, LayerBuilder
from paceline.models.layers import AttentionConfig, DenseMLP, ExpertMLP, LayerConfig, Mamba2Config, Recurrent

Layers = tuple[LayerConfig, ...]
Mixer = AttentionConfig | Recurrent
MLP = DenseMLP | ExpertMLP

MAX_HEADS = 4096
MAX_KERNEL_SIZE = 16


def mixed_layers(
    build: LayerBuilder, mixers: Mapping[str, Mixer], mlps: Sequence[MLP], *, kinds: Sequence[str], residual_scale: float = 1.0
) -> Layers:
    """Return layers with the mixers that `layer_types` names; `kinds` is used if it is absent.

    Raises:
        CheckpointError: `layer_types` has another length, names an unknown mixer, or names no attention.
    """
    fields, listed = build.fields, build.fields.values.get("layer_types")
    listed = list(kinds) if listed is None else listed
    if not isinstance(listed, list) or len(listed) != build.num_layers:
        count = f"{len(listed)} layers" if isinstance(listed, list) else shortened(listed)
        raise CheckpointError(f"{fields.path}: layer_types names {count}, but num_hidden_layers = {build.num_layers}")
    for kind in listed:
        if not isinstance(kind, str) or kind not in mixers:
            raise CheckpointError(
                f"{fields.path}: layer_types names {shortened(kind)}, which is not supported for {build.family.name}; "
                f"supported are {', '.join(mixers)}"
            )
    if not any(isinstance(mixers[kind], AttentionConfig) for kind in listed):
        raise CheckpointError(f"{fields.path}: layer_types names no layer with attention: at least one of the layers needs it")
    known: dict[LayerConfig, LayerConfig] = {}
    found = (LayerConfig(mixer=mixers[kind], mlp=mlp, residual_scale=residual_scale) for kind, mlp in zip(listed, mlps, strict=True))
    return tuple(known.setdefault(layer, layer) for layer in found)


def mamba_mixer(build: LayerBuilder, names: Mapping[str, str], *, head_size: int, conv_bias: bool, bias: bool) -> Mamba2Config:
    """Return a Mamba-2 mixer, with sizes from the config.json fields whose names are given."""
    fields = build.fields
    heads, groups = (fields.size(names[count], most=MAX_HEADS) for count in ("heads", "groups"))
    if heads % groups:
        raise CheckpointError(f"{fields.path}: {names['heads']} = {heads} must be a multiple of {names['groups']} = {groups}")
    return Mamba2Config(
        num_heads=heads,
        head_size=head_size,
        num_groups=groups,
        state_size=fields.size(names["state"], most=MAX_HEAD_SIZE),
        kernel_size=fields.size(names["kernel"], most=MAX_KERNEL_SIZE),
        norm_groups=groups,
        conv_bias=conv_bias,
        bias=bias,
        dt_limits=_dt_limits(fields),
    )


def _dt_limits(fields: JsonFields) -> tuple[float, float]:
    """Return `time_step_limit`. transformers writes infinity as {"__float__": "Infinity"}."""
    given = fields.values.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    limits = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in given] if isinstance(given, list) else []
    if len(limits) != 2 or any(isinstance(limit, bool) or not isinstance(limit, int | float) for limit in limits):
        raise CheckpointError(f"{fields.path}: time_step_limit = {shortened(given)}, expected two numbers")
    least, most = (float(limit) for limit in limits)
    if not 0.0 <= least < most or least > LARGEST:
        raise CheckpointError(f"{fields.path}: time_step_limit = {shortened(given)}, expected a number of 0 or more and a larger one")
    return least, most


def gguf_layer_count(fields: GgufFields, num_blocks: int) -> dict[str, int]:
    """Return `num_hidden_layers` without modules for multi-token prediction, which `block_count` may include."""
    modules = [block for block in range(num_blocks) if fields.has(f"blk.{block}.{MTP_TENSOR}")]
    return {"num_hidden_layers": fields.num_layers_without_mtp(num_blocks, num_blocks - modules[0] if modules else 0)}


def layers_with_attention(fields: GgufFields, num_layers: int) -> list[bool]:
    """Return for each layer whether its number of key and value heads is above 0, so that it has attention."""
    counts = fields.architecture_value("attention.head_count_kv")
    if not isinstance(counts, list) or len(counts) < num_layers:  # the list may include layers of modules for multi-token prediction
        fields.refuse("attention.head_count_kv", counts, f"a number for each of {num_layers} layers, 0 for those without attention")
    return [count != 0 for count in counts[:num_layers]]


def mamba_gguf_fields(fields: GgufFields, num_layers: int, heads: str, size: str, state: str) -> dict[str, Any]:
    """Return the config.json fields of Mamba-2 mixers. The names of three of them differ between families."""
    num_heads, inner = fields.count("ssm.time_step_rank"), fields.count("ssm.inner_size")
    if inner % num_heads:
        fields.refuse("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank, {num_heads}")
    return {
        heads: num_heads,
        size: inner // num_heads,
        state: fields.count("ssm.state_size"),
        "mamba_n_groups": fields.count("ssm.group_count"),
        "mamba_d_conv": fields.count("ssm.conv_kernel"),
        "mamba_conv_bias": fields.has_in_any_block("ssm_conv1d.bias", num_layers),
        "mamba_proj_bias": fields.has_in_any_block("ssm_in.bias", num_layers),
    }
