"""Where GGUF files have tensors that are parts of others, or whose rows are in another order than the network's.

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
from paceline.models.gguf.stored_tensor import IndexMap, TensorSource, check_stored_shape
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
from paceline.models.storage.fused_matrices import Parts, fused_by_key_head, fused_in_layer, fused_projections, num_rows

_PROJECTION_NAMES = {"self_attn.qkv_proj": ("attn_qkv", "attn_q"), "mlp.gate_up_proj": ("ffn_up", "ffn_gate")}
"""GGUF names of fused projections, and of the first matrix of each in files that do not fuse them."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Which stored tensor holds a tensor of the network, and in which rows and columns.

    Attributes:
        name: name of the stored tensor.
        shapes: shapes that the stored tensor may have, such as [n] or [n, 1].
        first_row, rows, columns, expert: as in `TensorSource`; `expert` also selects one of the heads that latent attention stacks.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    first_row: int = 0
    rows: IndexMap | None = None
    columns: IndexMap | None = None
    expert: int | None = None

    def source(self, tensor: GgufTensor, shape: tuple[int, ...]) -> TensorSource:
        """Return the source of a network's tensor of this shape in the stored `tensor`.

        Raises:
            CheckpointError: The stored tensor has another shape, or a type that is not supported.
        """
        source = TensorSource(tensor, shape, self.expert, first_row=self.first_row, rows=self.rows, columns=self.columns)
        check_stored_shape(source, *self.shapes)
        return source


def tensor_locations(file: GgufFile, config: ModelConfig) -> dict[str, TensorLocation]:
    """Return where tensors of recurrent mixers, of gated or latent attention, and of fused matrices are stored, by internal names."""
    found: dict[str, TensorLocation] = {}
    family = FAMILIES[config.family]
    is_tiled = gguf_format(family).has_tiled_value_heads
    for index, layer in enumerate(config.layers):
        block, hidden = f"blk.{index}.", config.hidden_size
        own = _fused_tensors(block, layer, family, hidden) | _fused_experts(file, block, layer.mlp, hidden)
        if family.has_fused_projections:
            own |= _fused_projections(file, block, layer, hidden)
        for mixer in layer.mixers:
            if isinstance(mixer, AttentionConfig):
                own |= {} if mixer.latent is None else _latent_attention_tensors(block, mixer, mixer.latent)
            elif isinstance(mixer, GatedDeltaConfig):
                own |= _delta_net_tensors(file, block, mixer, hidden, is_tiled=is_tiled)
            elif isinstance(mixer, Mamba2Config):
                own |= _mamba2_tensors(block, mixer, hidden)
            else:
                own |= _short_convolution_tensors(block, mixer)
        found |= {f"layers.{index}.{name}": tensor for name, tensor in own.items()}
    return found


def _fused_tensors(block: str, layer: LayerConfig, family: Family, hidden: int) -> dict[str, TensorLocation]:
    """Return the parts of matrices that GGUF files fuse as checkpoints of the family do (`fused_in_layer`)."""
    has_short_convolution = any(isinstance(mixer, ShortConvConfig) for mixer in layer.mixers)
    latent = layer.attention.latent if isinstance(layer.mixer, AttentionConfig) else None
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        f"{family.recurrent_module}.in_proj": "shortconv.in_proj" if has_short_convolution else "ssm_in",
    }
    found: dict[str, TensorLocation] = {}
    for source, parts in fused_in_layer(layer, family).items():
        if source in names:
            columns = latent.query_rank if latent is not None and source == "self_attn.q_b_proj" else hidden
            found |= _parts(block + names[source], parts, columns)
    return found


def _fused_projections(file: GgufFile, block: str, layer: LayerConfig, hidden: int) -> dict[str, TensorLocation]:
    """Return q, k, v, gate and up if the file fuses them in one matrix."""
    found: dict[str, TensorLocation] = {}
    for source, parts in fused_projections(layer).items():
        stack, separate = _PROJECTION_NAMES[source]
        if f"{block}{stack}.weight" in file.tensors and f"{block}{separate}.weight" not in file.tensors:
            found |= _parts(block + stack, parts, hidden)
    return found


def _fused_experts(file: GgufFile, block: str, mlp: DenseMLP | ExpertMLP | None, hidden: int) -> dict[str, TensorLocation]:
    """Return gate and up of experts if the file fuses them in one stack for each layer."""
    name = f"{block}ffn_gate_up_exps.weight"
    if name not in file.tensors or not isinstance(mlp, ExpertMLP):
        return {}
    count, inner = mlp.routing.num_experts, mlp.expert.intermediate_size
    return {
        f"experts.{expert}.{part}.weight": TensorLocation(name, ((count, 2 * inner, hidden),), first_row=number * inner, expert=expert)
        for expert in range(count)
        for number, part in enumerate(("gate_proj", "up_proj"))
    }


def _parts(name: str, parts: Parts, columns: int) -> dict[str, TensorLocation]:
    """Return weights and biases that are rows of a stored tensor."""
    shapes = {"weight": (num_rows(parts), columns), "bias": (num_rows(parts),)}
    return {
        f"{part}.{kind}": TensorLocation(f"{name}.{kind}", (shape,), first_row=rows.start)
        if isinstance(rows, slice)
        else TensorLocation(f"{name}.{kind}", (shape,), rows=partial(np.asarray, rows))
        for part, rows in parts.items()
        for kind, shape in shapes.items()
    }


def _latent_attention_tensors(block: str, mixer: AttentionConfig, latent: LatentProjections) -> dict[str, TensorLocation]:
    """Return the up-projections of latent attention. Files have them as the network has them, stacked by head."""
    heads, rank = mixer.num_heads, mixer.latent_size
    found: dict[str, TensorLocation] = {}
    for head in range(heads):
        found[f"k_up.{head}.weight"] = TensorLocation(f"{block}attn_k_b.weight", ((heads, rank, latent.query_size),), expert=head)
        found[f"v_up.{head}.weight"] = TensorLocation(f"{block}attn_v_b.weight", ((heads, latent.value_size, rank),), expert=head)
    return found


def _delta_net_tensors(file: GgufFile, block: str, mixer: GatedDeltaConfig, hidden: int, *, is_tiled: bool) -> dict[str, TensorLocation]:
    state, channels = mixer.state_shape, mixer.channels
    per_key_head = state.heads // state.key_heads

    def value_head_rows(size: int, num_before: int = 0) -> IndexMap | None:
        """Return the stored row of each row of the network: value heads of `size` rows after `num_before` rows; None if both are equal."""
        return partial(_value_head_order, state.key_heads, per_key_head, size, num_before) if is_tiled and per_key_head > 1 else None

    def projection(part: str, size: int, order: IndexMap | None) -> TensorLocation:
        return TensorLocation(block + part, ((size, hidden),), rows=order)

    head_shapes, num_keys = ((state.heads,), (state.heads, 1)), 2 * state.key_width
    found = {
        "conv_proj.weight": projection("attn_qkv.weight", channels, value_head_rows(state.columns, num_keys)),
        "z_proj.weight": projection("attn_gate.weight", state.value_width, value_head_rows(state.columns)),
        "b_proj.weight": projection("ssm_beta.weight", state.heads, value_head_rows(1)),
        "a_proj.weight": projection("ssm_alpha.weight", state.heads, value_head_rows(1)),
        "decay.weight": TensorLocation(f"{block}ssm_a", head_shapes, rows=value_head_rows(1)),
        "decay.bias": TensorLocation(f"{block}ssm_dt.bias", head_shapes, rows=value_head_rows(1)),
        "conv.weight": TensorLocation(
            f"{block}ssm_conv1d.weight", ((channels, mixer.kernel_size),), rows=value_head_rows(state.columns, num_keys)
        ),
        "gated_norm.weight": TensorLocation(f"{block}ssm_norm.weight", ((state.columns,),)),
        "out_proj.weight": TensorLocation(f"{block}ssm_out.weight", ((hidden, state.value_width),), columns=value_head_rows(state.columns)),
    }
    for name, source in (("ssm_in", "in_proj_qkvz"), ("ssm_ba", "in_proj_ba")):  # Qwen3-Next
        if f"{block}{name}.weight" in file.tensors:
            found |= _parts(f"{block}{name}", fused_by_key_head(mixer)[source], hidden)
    return found


def _mamba2_tensors(block: str, mixer: Mamba2Config, hidden: int) -> dict[str, TensorLocation]:
    state, channels = mixer.state_shape, mixer.channels
    head_shapes = ((state.heads, 1), (state.heads,))
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


def _value_head_order(key_heads: int, per_key_head: int, size: int, num_before: int) -> NDArray[np.int64]:
    """Return, for each row of the network's matrix, the index of this row in the file.

    The network has all value heads of the first key head first; the file has the first value head of every key head first. The order of the
    first `num_before` rows, which belong to no value head, is the same in both.
    """
    stored = np.arange(key_heads * per_key_head * size).reshape(per_key_head, key_heads, size)
    return np.concatenate((np.arange(num_before), num_before + stored.swapaxes(0, 1).reshape(-1)))
