"""Find tensors that GGUF files store as part of a larger tensor, or with rows in another order than the network's.

llama.cpp's converters reorder the rows of some matrices. A list of row indices restores the original order without dequantising.
Source: llama.cpp's conversion of Qwen3-Next, Qwen3.5, LFM2, Granite 4 and Nemotron-H.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.models.config import ModelConfig
from paceline.models.families.family import Family
from paceline.models.families.table import FAMILIES
from paceline.models.gguf.config import gguf_format
from paceline.models.gguf.file import GgufFile
from paceline.models.gguf.header import GgufTensor
from paceline.models.gguf.stored_tensor import StoredIndexFunction, TensorSource, check_stored_shape
from paceline.models.layers import (
    AttentionConfig,
    DenseMLP,
    ExpertMLP,
    GatedDeltaConfig,
    LatentProjections,
    LayerConfig,
    Mamba2Config,
    ShortConvConfig,
)
from paceline.models.storage.fused_matrices import RowsByMatrix, fused_by_key_head, fused_in_layer, fused_projections, num_rows

_PROJECTION_NAMES = {"self_attn.qkv_proj": ("attn_qkv", "attn_q"), "mlp.gate_up_proj": ("ffn_up", "ffn_gate")}
"""GGUF names of fused projections, and of the first projection in files that do not fuse them."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Name, rows and columns of the stored tensor that holds a tensor of the network.

    Attributes:
        name: name of the stored tensor.
        allowed_shapes: shapes that the stored tensor may have, such as [n] or [n, 1].
        first_row, row_order, column_order, stack_index: as in `TensorSource`.
    """

    name: str
    allowed_shapes: tuple[tuple[int, ...], ...]
    first_row: int = 0
    row_order: StoredIndexFunction | None = None
    column_order: StoredIndexFunction | None = None
    stack_index: int | None = None

    def to_source(self, tensor: GgufTensor, shape: tuple[int, ...]) -> TensorSource:
        """Return where a network's tensor of shape `shape` is in the stored `tensor`.

        Raises:
            CheckpointError: The stored tensor has none of the allowed shapes, or a type that is not supported.
        """
        source = TensorSource(tensor, shape, self.stack_index, self.first_row, self.row_order, self.column_order)
        check_stored_shape(source, *self.allowed_shapes)
        return source


def tensor_locations(file: GgufFile, config: ModelConfig) -> dict[str, TensorLocation]:
    """Return by internal name where the tensors of recurrent mixers, gated or latent attention and fused matrices are stored."""
    locations: dict[str, TensorLocation] = {}
    family = FAMILIES[config.family]
    has_reordered_value_heads = gguf_format(family).interleaves_value_heads_of_key_heads
    for index, layer in enumerate(config.layers):
        block, hidden = f"blk.{index}.", config.hidden_size
        in_layer = _fused_tensors(block, layer, family, hidden) | _fused_experts(file, block, layer.mlp, hidden)
        if family.has_fused_projections:
            in_layer |= _fused_projections(file, block, layer, hidden)
        for mixer in layer.mixers:
            if isinstance(mixer, AttentionConfig):
                in_layer |= {} if mixer.latent is None else _latent_attention_tensors(block, mixer, mixer.latent)
            elif isinstance(mixer, GatedDeltaConfig):
                in_layer |= _delta_net_tensors(file, block, mixer, hidden, has_reordered_value_heads=has_reordered_value_heads)
            elif isinstance(mixer, Mamba2Config):
                in_layer |= _mamba2_tensors(block, mixer, hidden)
            else:
                in_layer |= _short_convolution_tensors(block, mixer)
        locations |= {f"layers.{index}.{name}": tensor for name, tensor in in_layer.items()}
    return locations


def _fused_tensors(block: str, layer: LayerConfig, family: Family, hidden: int) -> dict[str, TensorLocation]:
    """Return the locations of matrices that GGUF files store fused in the same way as the family's checkpoints."""
    has_short_convolution = any(isinstance(mixer, ShortConvConfig) for mixer in layer.mixers)
    latent = layer.attention.latent if isinstance(layer.mixer, AttentionConfig) else None
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        f"{family.recurrent_module}.in_proj": "shortconv.in_proj" if has_short_convolution else "ssm_in",
    }
    locations: dict[str, TensorLocation] = {}
    for fused_name, parts in fused_in_layer(layer, family).items():
        if fused_name in names:
            columns = latent.query_rank if latent is not None and fused_name == "self_attn.q_b_proj" else hidden
            locations |= _part_locations(block + names[fused_name], parts, columns)
    return locations


def _fused_projections(file: GgufFile, block: str, layer: LayerConfig, hidden: int) -> dict[str, TensorLocation]:
    """Return the locations of q, k and v if the file fuses them in one matrix, and of gate and up if it fuses these."""
    locations: dict[str, TensorLocation] = {}
    for fused_name, parts in fused_projections(layer).items():
        stack, separate = _PROJECTION_NAMES[fused_name]
        if f"{block}{stack}.weight" in file.tensors and f"{block}{separate}.weight" not in file.tensors:
            locations |= _part_locations(block + stack, parts, hidden)
    return locations


def _fused_experts(file: GgufFile, block: str, mlp: DenseMLP | ExpertMLP | None, hidden: int) -> dict[str, TensorLocation]:
    """Return the locations of the experts' gate and up matrices if the file fuses them in one stacked tensor for each layer."""
    name = f"{block}ffn_gate_up_exps.weight"
    if name not in file.tensors or not isinstance(mlp, ExpertMLP):
        return {}
    count, inner = mlp.routing.num_experts, mlp.expert.intermediate_size
    return {
        f"experts.{expert}.{part}.weight": TensorLocation(name, ((count, 2 * inner, hidden),), first_row=number * inner, stack_index=expert)
        for expert in range(count)
        for number, part in enumerate(("gate_proj", "up_proj"))
    }


def _part_locations(name: str, parts: RowsByMatrix, columns: int) -> dict[str, TensorLocation]:
    """Return the locations of matrices whose weights are rows of the stored `{name}.weight`, and their biases rows of `{name}.bias`."""
    shapes = {"weight": (num_rows(parts), columns), "bias": (num_rows(parts),)}
    return {
        f"{part}.{kind}": TensorLocation(f"{name}.{kind}", (shape,), first_row=rows.start)
        if isinstance(rows, slice)
        else TensorLocation(f"{name}.{kind}", (shape,), row_order=partial(np.asarray, rows))
        for part, rows in parts.items()
        for kind, shape in shapes.items()
    }


def _latent_attention_tensors(block: str, mixer: AttentionConfig, latent: LatentProjections) -> dict[str, TensorLocation]:
    """Return the locations of the up-projections of latent attention. A file stacks those of all heads in one tensor."""
    heads, rank = mixer.num_heads, mixer.latent_size
    locations: dict[str, TensorLocation] = {}
    for head in range(heads):
        locations[f"k_up.{head}.weight"] = TensorLocation(
            f"{block}attn_k_b.weight", ((heads, rank, latent.unrotated_size),), stack_index=head
        )
        locations[f"v_up.{head}.weight"] = TensorLocation(f"{block}attn_v_b.weight", ((heads, latent.value_size, rank),), stack_index=head)
    return locations


def _delta_net_tensors(
    file: GgufFile, block: str, mixer: GatedDeltaConfig, hidden: int, *, has_reordered_value_heads: bool
) -> dict[str, TensorLocation]:
    state, channels = mixer.state_shape, mixer.channels
    per_key_head = state.num_heads // state.num_key_heads

    def value_head_order(head_size: int, num_rows_before: int = 0) -> StoredIndexFunction | None:
        """Return a function for the stored index of each row; the first `num_rows_before` rows stay in place. None = all rows stay."""
        is_reordered = has_reordered_value_heads and per_key_head > 1
        return partial(_value_head_order, state.num_key_heads, per_key_head, head_size, num_rows_before) if is_reordered else None

    def locate_projection(stored_name: str, num_rows: int, row_order: StoredIndexFunction | None) -> TensorLocation:
        return TensorLocation(block + stored_name, ((num_rows, hidden),), row_order=row_order)

    head_shapes, num_keys = ((state.num_heads,), (state.num_heads, 1)), 2 * state.key_width
    locations = {
        "conv_proj.weight": locate_projection("attn_qkv.weight", channels, value_head_order(state.columns, num_keys)),
        "z_proj.weight": locate_projection("attn_gate.weight", state.value_width, value_head_order(state.columns)),
        "b_proj.weight": locate_projection("ssm_beta.weight", state.num_heads, value_head_order(1)),
        "a_proj.weight": locate_projection("ssm_alpha.weight", state.num_heads, value_head_order(1)),
        "decay.weight": TensorLocation(f"{block}ssm_a", head_shapes, row_order=value_head_order(1)),
        "decay.bias": TensorLocation(f"{block}ssm_dt.bias", head_shapes, row_order=value_head_order(1)),
        "conv.weight": TensorLocation(
            f"{block}ssm_conv1d.weight", ((channels, mixer.kernel_size),), row_order=value_head_order(state.columns, num_keys)
        ),
        "gated_norm.weight": TensorLocation(f"{block}ssm_norm.weight", ((state.columns,),)),
        "out_proj.weight": TensorLocation(
            f"{block}ssm_out.weight", ((hidden, state.value_width),), column_order=value_head_order(state.columns)
        ),
    }
    for name, fused_name in (("ssm_in", "in_proj_qkvz"), ("ssm_ba", "in_proj_ba")):  # only Qwen3-Next
        if f"{block}{name}.weight" in file.tensors:
            locations |= _part_locations(f"{block}{name}", fused_by_key_head(mixer)[fused_name], hidden)
    return locations


def _mamba2_tensors(block: str, mixer: Mamba2Config, hidden: int) -> dict[str, TensorLocation]:
    state, channels = mixer.state_shape, mixer.channels
    head_shapes = ((state.num_heads, 1), (state.num_heads,))
    norm_shapes = ((mixer.norm_groups, state.value_width // mixer.norm_groups), (state.value_width,))
    return {
        "conv.weight": TensorLocation(f"{block}ssm_conv1d.weight", ((channels, mixer.kernel_size),)),
        "conv.bias": TensorLocation(f"{block}ssm_conv1d.bias", ((channels,),)),
        "decay.weight": TensorLocation(f"{block}ssm_a", head_shapes),
        "decay.bias": TensorLocation(f"{block}ssm_dt.bias", head_shapes),
        "skip.weight": TensorLocation(f"{block}ssm_d", head_shapes),
        "gated_norm.weight": TensorLocation(f"{block}ssm_norm.weight", norm_shapes),
        "out_proj.weight": TensorLocation(f"{block}ssm_out.weight", ((hidden, state.value_width),)),
        "out_proj.bias": TensorLocation(f"{block}ssm_out.bias", ((hidden,),)),
    }


def _short_convolution_tensors(block: str, mixer: ShortConvConfig) -> dict[str, TensorLocation]:
    size = mixer.channels
    return {
        "conv.weight": TensorLocation(f"{block}shortconv.conv.weight", ((size, mixer.kernel_size),)),
        "conv.bias": TensorLocation(f"{block}shortconv.conv.bias", ((size,),)),
        "out_proj.weight": TensorLocation(f"{block}shortconv.out_proj.weight", ((size, size),)),
        "out_proj.bias": TensorLocation(f"{block}shortconv.out_proj.bias", ((size,),)),
    }


def _value_head_order(num_key_heads: int, heads_per_key_head: int, head_size: int, num_rows_before: int) -> NDArray[np.int64]:
    """Return the stored row of each row of the network's matrix.

    The network has all value heads of the first key head first; the file has the first value head of every key head first. The
    `num_rows_before` rows before the value heads have the same order in both.
    """
    stored = np.arange(num_key_heads * heads_per_key_head * head_size).reshape(heads_per_key_head, num_key_heads, head_size)
    return np.concatenate((np.arange(num_rows_before), num_rows_before + stored.swapaxes(0, 1).reshape(-1)))
