"""Names and row orders of the tensors of gated and latent attention and of recurrent mixers in GGUF files.

llama.cpp's converters reorder the rows of some matrices. A list of row indices restores the original order without dequantising.
Source: llama.cpp's conversion of Qwen3-Next, Qwen3.5, LFM2, Granite 4 and Nemotron-H.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.models.config import ModelConfig
from paceline.models.families.table import FAMILIES
from paceline.models.gguf.config import gguf_format
from paceline.models.gguf.file import GgufFile
from paceline.models.gguf.header import GgufTensor
from paceline.models.gguf.stored_tensor import IndexMap, TensorSource, check_stored_shape
from paceline.models.layers import AttentionConfig, AttentionGate, GatedDeltaConfig, LatentProjections, Mamba2Config, ShortConvConfig
from paceline.models.weights import half_split_order


@dataclass(frozen=True, slots=True)
class MixerTensor:
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


def mixer_tensors(file: GgufFile, config: ModelConfig) -> dict[str, MixerTensor]:
    """Return where tensors of recurrent mixers, and those of gated and latent attention, are stored, by internal names."""
    found: dict[str, MixerTensor] = {}
    gguf = gguf_format(FAMILIES[config.family])
    for index, layer in enumerate(config.layers):
        block, hidden = f"blk.{index}.", config.hidden_size
        for mixer in layer.mixers:
            if isinstance(mixer, AttentionConfig) and mixer.latent is not None:
                own = _latent_attention_tensors(block, mixer, mixer.latent, hidden)
            elif isinstance(mixer, AttentionConfig):
                has_gated_queries = mixer.gate is AttentionGate.VALUE and "attention_gate" not in gguf.module_names
                own = _gated_query_tensors(block, mixer, hidden) if has_gated_queries else {}
            elif isinstance(mixer, GatedDeltaConfig):
                own = _delta_net_tensors(file, block, mixer, hidden, is_tiled=gguf.has_tiled_value_heads)
            elif isinstance(mixer, Mamba2Config):
                own = _mamba2_tensors(block, mixer, hidden)
            else:
                own = _short_convolution_tensors(block, mixer)
            found |= {f"layers.{index}.{name}": tensor for name, tensor in own.items()}
    return found


def _gated_query_tensors(block: str, mixer: AttentionConfig, hidden: int) -> dict[str, MixerTensor]:
    """Return queries and gates, stored in one matrix: the query rows of a head, its gate rows, then those of the next head."""
    found, num_rows = dict[str, MixerTensor](), 2 * mixer.query_size
    for number, part in enumerate(("q_proj", "attention_gate")):
        rows = partial(_strided_slices, num_rows, 2 * mixer.head_size, number * mixer.head_size, mixer.head_size)
        found[f"{part}.weight"] = MixerTensor(f"{block}attn_q.weight", ((num_rows, hidden),), rows=rows)
        if mixer.bias:
            found[f"{part}.bias"] = MixerTensor(f"{block}attn_q.bias", ((num_rows,),), rows=rows)
    return found


def _latent_attention_tensors(block: str, mixer: AttentionConfig, latent: LatentProjections, hidden: int) -> dict[str, MixerTensor]:
    """Return the projections of latent attention. Files have the up-projections as the network has them, stacked by head."""
    heads, rank, size, rope = mixer.num_heads, mixer.latent_size, latent.query_size, latent.rope_size
    num_rows, columns = heads * (size + rope), latent.query_rank or hidden
    query, shapes = f"{block}attn_{'q_b' if latent.query_rank else 'q'}.weight", ((num_rows, columns),)
    found = {
        "q_proj.weight": MixerTensor(query, shapes, rows=partial(_strided_slices, num_rows, size + rope, 0, size)),
        "q_rope_proj.weight": MixerTensor(query, shapes, rows=partial(_half_split_tails, num_rows, size + rope, rope)),
        "kv_a_proj.weight": MixerTensor(f"{block}attn_kv_a_mqa.weight", ((rank + rope, hidden),)),
        "k_rope_proj.weight": MixerTensor(
            f"{block}attn_kv_a_mqa.weight", ((rank + rope, hidden),), rows=partial(_half_split_tails, rank + rope, rank + rope, rope)
        ),
    }
    for head in range(heads):
        found[f"k_up.{head}.weight"] = MixerTensor(f"{block}attn_k_b.weight", ((heads, rank, size),), expert=head)
        found[f"v_up.{head}.weight"] = MixerTensor(f"{block}attn_v_b.weight", ((heads, latent.value_size, rank),), expert=head)
    return found


def _delta_net_tensors(file: GgufFile, block: str, mixer: GatedDeltaConfig, hidden: int, *, is_tiled: bool) -> dict[str, MixerTensor]:
    state, channels = mixer.state_shape, mixer.channels
    per_key_head = state.heads // state.key_heads

    def value_head_rows(size: int, num_before: int = 0) -> IndexMap | None:
        """Return the stored row of each row of the network: value heads of `size` rows after `num_before` rows; None if both are equal."""
        return partial(_value_head_order, state.key_heads, per_key_head, size, num_before) if is_tiled and per_key_head > 1 else None

    def projection(part: str, size: int, order: IndexMap | None) -> MixerTensor:
        return MixerTensor(block + part, ((size, hidden),), rows=order)

    head_shapes, num_keys = ((state.heads,), (state.heads, 1)), 2 * state.key_width
    found = {
        "conv_proj.weight": projection("attn_qkv.weight", channels, value_head_rows(state.columns, num_keys)),
        "z_proj.weight": projection("attn_gate.weight", state.value_width, value_head_rows(state.columns)),
        "b_proj.weight": projection("ssm_beta.weight", state.heads, value_head_rows(1)),
        "a_proj.weight": projection("ssm_alpha.weight", state.heads, value_head_rows(1)),
        "decay.weight": MixerTensor(f"{block}ssm_a", head_shapes, rows=value_head_rows(1)),
        "decay.bias": MixerTensor(f"{block}ssm_dt.bias", head_shapes, rows=value_head_rows(1)),
        "conv.weight": MixerTensor(
            f"{block}ssm_conv1d.weight", ((channels, mixer.kernel_size),), rows=value_head_rows(state.columns, num_keys)
        ),
        "gated_norm.weight": MixerTensor(f"{block}ssm_norm.weight", ((state.columns,),)),
        "out_proj.weight": MixerTensor(f"{block}ssm_out.weight", ((hidden, state.value_width),), columns=value_head_rows(state.columns)),
    }
    if f"{block}ssm_ba.weight" in file.tensors:
        for number, part in enumerate(("b_proj", "a_proj")):
            rows = partial(_strided_slices, 2 * state.heads, 2 * per_key_head, number * per_key_head, per_key_head)
            found[f"{part}.weight"] = projection("ssm_ba.weight", 2 * state.heads, rows)
    if f"{block}ssm_in.weight" in file.tensors:
        found |= _fused_delta_net_tensors(block, mixer, hidden)
    return found


def _fused_delta_net_tensors(block: str, mixer: GatedDeltaConfig, hidden: int) -> dict[str, MixerTensor]:
    """Return qkv and z of early Qwen3-Next files, which fuse them: query, key, value and gate rows of a key head, then of the next."""
    state = mixer.state_shape
    value_rows = state.value_width // state.key_heads
    num_rows, step = mixer.channels + state.value_width, 2 * state.rows + 2 * value_rows
    starts = ((0, state.rows), (state.rows, state.rows), (2 * state.rows, value_rows))
    qkv = partial(_concatenated_strided_slices, num_rows, step, starts)
    gates = partial(_strided_slices, num_rows, step, 2 * state.rows + value_rows, value_rows)
    name, shapes = f"{block}ssm_in.weight", ((num_rows, hidden),)
    return {"conv_proj.weight": MixerTensor(name, shapes, rows=qkv), "z_proj.weight": MixerTensor(name, shapes, rows=gates)}


def _mamba2_tensors(block: str, mixer: Mamba2Config, hidden: int) -> dict[str, MixerTensor]:
    state, channels = mixer.state_shape, mixer.channels
    num_rows, head_shapes = state.value_width + channels + state.heads, ((state.heads, 1), (state.heads,))
    norm_shapes = ((mixer.norm_groups, state.value_width // mixer.norm_groups), (state.value_width,))
    found = {
        "conv.weight": MixerTensor(f"{block}ssm_conv1d.weight", ((channels, mixer.kernel_size),)),
        "conv.bias": MixerTensor(f"{block}ssm_conv1d.bias", ((channels,),)),
        "decay.weight": MixerTensor(f"{block}ssm_a", head_shapes),
        "decay.bias": MixerTensor(f"{block}ssm_dt.bias", head_shapes),
        "skip.weight": MixerTensor(f"{block}ssm_d", head_shapes),
        "gated_norm.weight": MixerTensor(f"{block}ssm_norm.weight", norm_shapes),
        "out_proj.weight": MixerTensor(f"{block}ssm_out.weight", ((hidden, state.value_width),)),
        "out_proj.bias": MixerTensor(f"{block}ssm_out.bias", ((hidden,),)),
    }
    first_rows = {"z_proj": 0, "conv_proj": state.value_width, "dt_proj": state.value_width + channels}
    return found | _consecutive_parts(f"{block}ssm_in", (num_rows, hidden), first_rows)


def _short_convolution_tensors(block: str, mixer: ShortConvConfig) -> dict[str, MixerTensor]:
    size = mixer.channels
    found = {
        "conv.weight": MixerTensor(f"{block}shortconv.conv.weight", ((size, mixer.kernel_size),)),
        "conv.bias": MixerTensor(f"{block}shortconv.conv.bias", ((size,),)),
        "out_proj.weight": MixerTensor(f"{block}shortconv.out_proj.weight", ((size, size),)),
        "out_proj.bias": MixerTensor(f"{block}shortconv.out_proj.bias", ((size,),)),
    }
    first_rows = {"b_proj": 0, "c_proj": size, "conv_proj": 2 * size}
    return found | _consecutive_parts(f"{block}shortconv.in_proj", (3 * size, size), first_rows)


def _consecutive_parts(name: str, shape: tuple[int, int], first_rows: Mapping[str, int]) -> dict[str, MixerTensor]:
    """Return weights and biases that are consecutive row ranges of a stored tensor, from the first row of each."""
    parts = {"weight": (shape,), "bias": (shape[:1],)}
    return {
        f"{part}.{kind}": MixerTensor(f"{name}.{kind}", shapes, first_row=first)
        for part, first in first_rows.items()
        for kind, shapes in parts.items()
    }


def _strided_slices(num_rows: int, step: int, start: int, size: int) -> NDArray[np.int64]:
    """Return row indices: of every `step` consecutive rows the `size` rows from `start` on."""
    return np.arange(num_rows).reshape(-1, step)[:, start : start + size].reshape(-1)


def _half_split_tails(num_rows: int, step: int, size: int) -> NDArray[np.int64]:
    """Return row indices: of every `step` rows the last `size`, from interleaved rotary pairs to pairs (j, j + size / 2)."""
    rows = _strided_slices(num_rows, step, step - size, size)
    return rows[half_split_order(len(rows), size, size)]


def _concatenated_strided_slices(num_rows: int, stride: int, slices: tuple[tuple[int, int], ...]) -> NDArray[np.int64]:
    """Return the concatenated row indices of `_strided_slices` for several `slices`, pairs of start and size."""
    return np.concatenate([_strided_slices(num_rows, stride, start, size) for start, size in slices])


def _value_head_order(key_heads: int, per_key_head: int, size: int, num_before: int) -> NDArray[np.int64]:
    """Return, for each row of the network's matrix, the index of this row in the file.

    The network has all value heads of the first key head first; the file has the first value head of every key head first. The order of the
    first `num_before` rows, which belong to no value head, is the same in both.
    """
    stored = np.arange(key_heads * per_key_head * size).reshape(per_key_head, key_heads, size)
    return np.concatenate((np.arange(num_before), num_before + stored.swapaxes(0, 1).reshape(-1)))
