"""The tensors of gated attention and of recurrent mixers in GGUF files.

Converters change the order of rows of some matrices. A list of row numbers undoes it, which moves whole rows of quantised blocks.
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
from paceline.models.gguf.stored_tensor import IndexMap, TensorSource, check_shape
from paceline.models.layers import AttentionConfig, GatedDeltaConfig, Mamba2Config, ShortConvConfig


@dataclass(frozen=True, slots=True)
class MixerTensor:
    """The stored tensor, and the order of its rows, that one tensor of the network is made of.

    Attributes:
        name: The tensor in the file.
        shapes: The shapes that it may have. All have the same meaning.
        first_row, rows, columns: As in `TensorSource`.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    first_row: int = 0
    rows: IndexMap | None = None
    columns: IndexMap | None = None

    def source(self, tensor: GgufTensor, shape: tuple[int, ...]) -> TensorSource:
        """Return the source of the tensor of the network with this shape.

        Raises:
            CheckpointError: The stored tensor has another shape, or a type that is not supported.
        """
        source = TensorSource(tensor, shape, first_row=self.first_row, rows=self.rows, columns=self.columns)
        check_shape(source, *self.shapes)
        return source


def mixer_tensors(file: GgufFile, config: ModelConfig) -> dict[str, MixerTensor]:
    """Return, by internal names, the tensors of recurrent mixers, and queries and gates that are stored as one matrix."""
    found: dict[str, MixerTensor] = {}
    is_tiled = gguf_format(FAMILIES[config.family]).has_tiled_value_heads
    for index, layer in enumerate(config.layers):
        block, mixer, hidden = f"blk.{index}.", layer.mixer, config.hidden_size
        if isinstance(mixer, AttentionConfig):
            own = _gated_queries(block, mixer, hidden) if mixer.is_gated else {}
        elif isinstance(mixer, GatedDeltaConfig):
            own = _delta_net(file, block, mixer, hidden, is_tiled=is_tiled)
        elif isinstance(mixer, Mamba2Config):
            own = _mamba2(block, mixer, hidden)
        else:
            own = {} if mixer is None else _short_convolution(block, mixer)
        found |= {f"layers.{index}.{name}": tensor for name, tensor in own.items()}
    return found


def _gated_queries(block: str, mixer: AttentionConfig, hidden: int) -> dict[str, MixerTensor]:
    """Return the queries and gates of gated attention. In the file each head has its queries, then its gates."""
    found, num_rows = dict[str, MixerTensor](), 2 * mixer.query_size
    for number, part in enumerate(("q_proj", "attention_gate")):
        rows = partial(_strided_slices, num_rows, 2 * mixer.head_size, number * mixer.head_size, mixer.head_size)
        found[f"{part}.weight"] = MixerTensor(f"{block}attn_q.weight", ((num_rows, hidden),), rows=rows)
        if mixer.bias:
            found[f"{part}.bias"] = MixerTensor(f"{block}attn_q.bias", ((num_rows,),), rows=rows)
    return found


def _delta_net(file: GgufFile, block: str, mixer: GatedDeltaConfig, hidden: int, *, is_tiled: bool) -> dict[str, MixerTensor]:
    state, channels = mixer.state, mixer.channels
    per_key_head = state.heads // state.key_heads

    def tiled(size: int, first: int = 0) -> IndexMap | None:
        """Return the stored order of value-head rows of this size, if tiled; the `first` rows before them keep their order."""
        return partial(_untiled_heads, state.key_heads, per_key_head, size, first) if is_tiled and per_key_head > 1 else None

    def values(part: str, size: int, order: IndexMap | None) -> MixerTensor:
        return MixerTensor(block + part, ((size, hidden),), rows=order)

    of_heads, num_keys = ((state.heads,), (state.heads, 1)), 2 * state.key_width
    found = {
        "conv_proj.weight": values("attn_qkv.weight", channels, tiled(state.columns, num_keys)),
        "z_proj.weight": values("attn_gate.weight", state.value_width, tiled(state.columns)),
        "b_proj.weight": values("ssm_beta.weight", state.heads, tiled(1)),
        "a_proj.weight": values("ssm_alpha.weight", state.heads, tiled(1)),
        "decay.weight": MixerTensor(f"{block}ssm_a", of_heads, rows=tiled(1)),
        "decay.bias": MixerTensor(f"{block}ssm_dt.bias", of_heads, rows=tiled(1)),
        "conv.weight": MixerTensor(f"{block}ssm_conv1d.weight", ((channels, mixer.kernel_size),), rows=tiled(state.columns, num_keys)),
        "gated_norm.weight": MixerTensor(f"{block}ssm_norm.weight", ((state.columns,),)),
        "o_proj.weight": MixerTensor(f"{block}ssm_out.weight", ((hidden, state.value_width),), columns=tiled(state.columns)),
    }
    if f"{block}ssm_ba.weight" in file.tensors:
        for number, part in enumerate(("b_proj", "a_proj")):
            rows = partial(_strided_slices, 2 * state.heads, 2 * per_key_head, number * per_key_head, per_key_head)
            found[f"{part}.weight"] = values("ssm_ba.weight", 2 * state.heads, rows)
    if f"{block}ssm_in.weight" in file.tensors:
        found |= _from_one_matrix(block, mixer, hidden)
    return found


def _from_one_matrix(block: str, mixer: GatedDeltaConfig, hidden: int) -> dict[str, MixerTensor]:
    """Return the rows of one matrix, as in early files of Qwen3-Next: for each key head its query, key, values and gates."""
    state = mixer.state
    own_values = state.value_width // state.key_heads
    num_rows, step = mixer.channels + state.value_width, 2 * state.rows + 2 * own_values
    starts = ((0, state.rows), (state.rows, state.rows), (2 * state.rows, own_values))
    taken = partial(_several_slices, num_rows, step, starts)
    gates = partial(_strided_slices, num_rows, step, 2 * state.rows + own_values, own_values)
    name, shapes = f"{block}ssm_in.weight", ((num_rows, hidden),)
    return {"conv_proj.weight": MixerTensor(name, shapes, rows=taken), "z_proj.weight": MixerTensor(name, shapes, rows=gates)}


def _mamba2(block: str, mixer: Mamba2Config, hidden: int) -> dict[str, MixerTensor]:
    state, channels = mixer.state, mixer.channels
    num_rows, of_heads = state.value_width + channels + state.heads, ((state.heads, 1), (state.heads,))
    by_groups = ((mixer.norm_groups, state.value_width // mixer.norm_groups), (state.value_width,))
    found = {
        "conv.weight": MixerTensor(f"{block}ssm_conv1d.weight", ((channels, mixer.kernel_size),)),
        "conv.bias": MixerTensor(f"{block}ssm_conv1d.bias", ((channels,),)),
        "decay.weight": MixerTensor(f"{block}ssm_a", of_heads),
        "decay.bias": MixerTensor(f"{block}ssm_dt.bias", of_heads),
        "skip.weight": MixerTensor(f"{block}ssm_d", of_heads),
        "gated_norm.weight": MixerTensor(f"{block}ssm_norm.weight", by_groups),
        "o_proj.weight": MixerTensor(f"{block}ssm_out.weight", ((hidden, state.value_width),)),
        "o_proj.bias": MixerTensor(f"{block}ssm_out.bias", ((hidden,),)),
    }
    first_rows = {"z_proj": 0, "conv_proj": state.value_width, "dt_proj": state.value_width + channels}
    return found | _row_ranges(f"{block}ssm_in", (num_rows, hidden), first_rows)


def _short_convolution(block: str, mixer: ShortConvConfig) -> dict[str, MixerTensor]:
    size = mixer.channels
    found = {
        "conv.weight": MixerTensor(f"{block}shortconv.conv.weight", ((size, mixer.kernel_size),)),
        "conv.bias": MixerTensor(f"{block}shortconv.conv.bias", ((size,),)),
        "o_proj.weight": MixerTensor(f"{block}shortconv.out_proj.weight", ((size, size),)),
        "o_proj.bias": MixerTensor(f"{block}shortconv.out_proj.bias", ((size,),)),
    }
    first_rows = {"b_proj": 0, "c_proj": size, "conv_proj": 2 * size}
    return found | _row_ranges(f"{block}shortconv.in_proj", (3 * size, size), first_rows)


def _row_ranges(name: str, shape: tuple[int, int], first_rows: Mapping[str, int]) -> dict[str, MixerTensor]:
    """Return matrices and biases that are row ranges of a stored tensor."""
    parts = {"weight": (shape,), "bias": (shape[:1],)}
    return {
        f"{part}.{kind}": MixerTensor(f"{name}.{kind}", shapes, first_row=first)
        for part, first in first_rows.items()
        for kind, shapes in parts.items()
    }


def _strided_slices(num_rows: int, step: int, start: int, size: int) -> NDArray[np.int64]:
    """Return `size` rows of every `step` rows, from `start` on."""
    return np.arange(num_rows).reshape(-1, step)[:, start : start + size].reshape(-1)


def _several_slices(num_rows: int, step: int, starts: tuple[tuple[int, int], ...]) -> NDArray[np.int64]:
    """Return the rows of `_strided_slices` for several starts and sizes, one after the other."""
    return np.concatenate([_strided_slices(num_rows, step, start, size) for start, size in starts])


def _untiled_heads(key_heads: int, per_key_head: int, size: int, first: int) -> NDArray[np.int64]:
    """Return the stored row of each value-head row: the network orders value heads by key head, the file by index within the key head."""
    stored = np.arange(key_heads * per_key_head * size).reshape(per_key_head, key_heads, size)
    return np.concatenate((np.arange(first), first + stored.swapaxes(0, 1).reshape(-1)))
