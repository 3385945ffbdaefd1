"""GGUF files of models whose layers are partly recurrent: what their metadata says in the terms of a config.json, and their tensors.

Converters put the rows of some matrices in another order; each is undone by a list of rows, which moves whole rows of blocks.
Source: llama.cpp's conversion of Qwen3-Next, Qwen3.5, LFM2, Granite 4 and Nemotron-H.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.models.config import ModelConfig
from paceline.models.gguf.fields import GgufFields
from paceline.models.gguf.file import GgufFile
from paceline.models.gguf.header import GgufTensor
from paceline.models.gguf.places import Order, Place, check
from paceline.models.layers import AttentionConfig, GatedDeltaConfig, Mamba2Config, ShortConvConfig

_QWEN = ("qwen35", "qwen35moe", "qwen3next")
_TILED = ("qwen35", "qwen35moe")
"""Their value heads stand by turns of the key heads: first the first of each key head, then the second of each."""
NEMOTRONS = ("nemotron_h", "nemotron_h_moe")
HYBRIDS = (*_QWEN, "lfm2", "lfm2moe", "granitehybrid", *NEMOTRONS)
MODULE_MARK = "nextn.eh_proj.weight"
"""What only a block that is a module for multi-token prediction has."""
_INTERVAL = 4  # every how many-th layer has attention, where a file does not say


@dataclass(frozen=True, slots=True)
class Source:
    """What one of our tensors is made of.

    Attributes:
        name: of the tensor in the file.
        shapes: that it may have, all with the same meaning.
        first_row, rows, columns: as in `Place`.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    first_row: int = 0
    rows: Order | None = None
    columns: Order | None = None

    def place(self, tensor: GgufTensor, shape: tuple[int, ...]) -> Place:
        """Where our tensor of this shape is.

        Raises:
            CheckpointError: the stored one has another shape or a type that cannot be read.
        """
        place = Place(tensor, shape, first_row=self.first_row, rows=self.rows, columns=self.columns)
        check(place, *self.shapes)
        return place


def hybrid_sources(file: GgufFile, config: ModelConfig) -> dict[str, Source]:
    """By our names, the tensors of recurrent mixers, and queries and gates that are stored as one matrix."""
    found: dict[str, Source] = {}
    for index, layer in enumerate(config.layers):
        block, mixer, hidden = f"blk.{index}.", layer.mixer, config.hidden_size
        if isinstance(mixer, AttentionConfig):
            own = _gated_queries(block, mixer, hidden) if mixer.is_gated else {}
        elif isinstance(mixer, GatedDeltaConfig):
            own = _delta_net(file, block, mixer, hidden)
        elif isinstance(mixer, Mamba2Config):
            own = _mamba2(block, mixer, hidden)
        else:
            own = {} if mixer is None else _short_convolution(block, mixer)
        found |= {f"layers.{index}.{name}": source for name, source in own.items()}
    return found


def _gated_queries(block: str, mixer: AttentionConfig, hidden: int) -> dict[str, Source]:
    """Each head's queries stand in front of its gates."""
    found, num_rows = dict[str, Source](), 2 * mixer.query_size
    for number, part in enumerate(("q_proj", "attention_gate")):
        rows = partial(_pieces, num_rows, 2 * mixer.head_size, number * mixer.head_size, mixer.head_size)
        found[f"{part}.weight"] = Source(f"{block}attn_q.weight", ((num_rows, hidden),), rows=rows)
        if mixer.bias:
            found[f"{part}.bias"] = Source(f"{block}attn_q.bias", ((num_rows,),), rows=rows)
    return found


def _delta_net(file: GgufFile, block: str, mixer: GatedDeltaConfig, hidden: int) -> dict[str, Source]:
    state, channels = mixer.state, mixer.channels
    per_key_head, is_tiled = state.heads // state.key_heads, file.metadata["general.architecture"] in _TILED

    def tiled(size: int, in_front: int = 0) -> Order | None:
        """The order of value heads of `size` rows, behind rows that stay."""
        return partial(_by_turns, state.key_heads, per_key_head, size, in_front) if is_tiled and per_key_head > 1 else None

    def values(part: str, size: int, order: Order | None) -> Source:
        return Source(block + part, ((size, hidden),), rows=order)

    of_heads, num_keys = ((state.heads,), (state.heads, 1)), 2 * state.key_width
    found = {
        "conv_proj.weight": values("attn_qkv.weight", channels, tiled(state.columns, num_keys)),
        "z_proj.weight": values("attn_gate.weight", state.value_width, tiled(state.columns)),
        "b_proj.weight": values("ssm_beta.weight", state.heads, tiled(1)),
        "a_proj.weight": values("ssm_alpha.weight", state.heads, tiled(1)),
        "decay.weight": Source(f"{block}ssm_a", of_heads, rows=tiled(1)),
        "decay.bias": Source(f"{block}ssm_dt.bias", of_heads, rows=tiled(1)),
        "conv.weight": Source(f"{block}ssm_conv1d.weight", ((channels, mixer.kernel_size),), rows=tiled(state.columns, num_keys)),
        "gated_norm.weight": Source(f"{block}ssm_norm.weight", ((state.columns,),)),
        "o_proj.weight": Source(f"{block}ssm_out.weight", ((hidden, state.value_width),), columns=tiled(state.columns)),
    }
    if f"{block}ssm_ba.weight" in file.tensors:
        for number, part in enumerate(("b_proj", "a_proj")):
            rows = partial(_pieces, 2 * state.heads, 2 * per_key_head, number * per_key_head, per_key_head)
            found[f"{part}.weight"] = values("ssm_ba.weight", 2 * state.heads, rows)
    if f"{block}ssm_in.weight" in file.tensors:
        found |= _of_one_matrix(block, mixer, hidden)
    return found


def _of_one_matrix(block: str, mixer: GatedDeltaConfig, hidden: int) -> dict[str, Source]:
    """As the first files of Qwen3-Next have it: each key head's queries, keys, values and gates side by side."""
    state = mixer.state
    own_values = state.value_width // state.key_heads
    num_rows, step = channels_and_gates(mixer), 2 * state.rows + 2 * own_values
    starts = ((0, state.rows), (state.rows, state.rows), (2 * state.rows, own_values))
    taken = partial(_side_by_side, num_rows, step, starts)
    gates = partial(_pieces, num_rows, step, 2 * state.rows + own_values, own_values)
    name, shapes = f"{block}ssm_in.weight", ((num_rows, hidden),)
    return {"conv_proj.weight": Source(name, shapes, rows=taken), "z_proj.weight": Source(name, shapes, rows=gates)}


def channels_and_gates(mixer: GatedDeltaConfig) -> int:
    """Rows of queries, keys, values and gates."""
    return mixer.channels + mixer.state.value_width


def _mamba2(block: str, mixer: Mamba2Config, hidden: int) -> dict[str, Source]:
    state, channels = mixer.state, mixer.channels
    num_rows, of_heads = state.value_width + channels + state.heads, ((state.heads, 1), (state.heads,))
    by_groups = ((mixer.norm_groups, state.value_width // mixer.norm_groups), (state.value_width,))
    found = {
        "conv.weight": Source(f"{block}ssm_conv1d.weight", ((channels, mixer.kernel_size),)),
        "conv.bias": Source(f"{block}ssm_conv1d.bias", ((channels,),)),
        "decay.weight": Source(f"{block}ssm_a", of_heads),
        "decay.bias": Source(f"{block}ssm_dt.bias", of_heads),
        "skip.weight": Source(f"{block}ssm_d", of_heads),
        "gated_norm.weight": Source(f"{block}ssm_norm.weight", by_groups),
        "o_proj.weight": Source(f"{block}ssm_out.weight", ((hidden, state.value_width),)),
        "o_proj.bias": Source(f"{block}ssm_out.bias", ((hidden,),)),
    }
    first_rows = {"z_proj": 0, "conv_proj": state.value_width, "dt_proj": state.value_width + channels}
    return found | _parts_of(f"{block}ssm_in", (num_rows, hidden), first_rows)


def _short_convolution(block: str, mixer: ShortConvConfig) -> dict[str, Source]:
    size = mixer.channels
    found = {
        "conv.weight": Source(f"{block}shortconv.conv.weight", ((size, mixer.kernel_size),)),
        "conv.bias": Source(f"{block}shortconv.conv.bias", ((size,),)),
        "o_proj.weight": Source(f"{block}shortconv.out_proj.weight", ((size, size),)),
        "o_proj.bias": Source(f"{block}shortconv.out_proj.bias", ((size,),)),
    }
    first_rows = {"b_proj": 0, "c_proj": size, "conv_proj": 2 * size}
    return found | _parts_of(f"{block}shortconv.in_proj", (3 * size, size), first_rows)


def _parts_of(name: str, shape: tuple[int, int], first_rows: Mapping[str, int]) -> dict[str, Source]:
    """Matrices, and biases, that are row ranges of a stored one."""
    parts = {"weight": (shape,), "bias": (shape[:1],)}
    return {
        f"{part}.{kind}": Source(f"{name}.{kind}", shapes, first_row=first)
        for part, first in first_rows.items()
        for kind, shapes in parts.items()
    }


def _pieces(num_rows: int, step: int, start: int, size: int) -> NDArray[np.int64]:
    """Of every `step` rows `size`, from `start` on."""
    return np.arange(num_rows).reshape(-1, step)[:, start : start + size].reshape(-1)


def _side_by_side(num_rows: int, step: int, starts: tuple[tuple[int, int], ...]) -> NDArray[np.int64]:
    """Such pieces of several starts and sizes, one kind behind the other."""
    return np.concatenate([_pieces(num_rows, step, start, size) for start, size in starts])


def _by_turns(key_heads: int, per_key_head: int, size: int, in_front: int) -> NDArray[np.int64]:
    """Rows of value heads that stand together by key heads, where they are stored by turns; `in_front` rows stay."""
    stored = np.arange(key_heads * per_key_head * size).reshape(per_key_head, key_heads, size)
    return np.concatenate((np.arange(in_front), in_front + stored.swapaxes(0, 1).reshape(-1)))


def hybrid_values(fields: GgufFields, values: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json would say of such a model, beside or instead of `values`.

    Raises:
        CheckpointError: a value is missing or absurd, or stands for something that is not computed.
    """
    num_layers, blocks = _num_layers(fields, values["num_hidden_layers"]), range(values["num_hidden_layers"])
    found = {
        "num_hidden_layers": num_layers,
        "attention_bias": any(fields.has(f"blk.{block}.attn_q.bias") for block in blocks),
        "attention_out_bias": any(fields.has(f"blk.{block}.attn_output.bias") for block in blocks),
    }
    if fields.architecture in _QWEN:
        return found | _qwen(fields, num_layers)
    if fields.architecture in NEMOTRONS:
        return found | _nemotron_h(fields, num_layers)
    return found | (_granite(fields, num_layers) if fields.architecture == "granitehybrid" else _lfm2(fields, num_layers))


def _num_layers(fields: GgufFields, num_blocks: int) -> int:
    """Without modules, which blocks count; tensors show one even where no metadata does."""
    shown = [block for block in range(num_blocks) if fields.has(f"blk.{block}.{MODULE_MARK}")]
    return fields.without_modules(num_blocks, num_blocks - shown[0] if shown else 0)


def _qwen(fields: GgufFields, num_layers: int) -> dict[str, Any]:
    num_values, inner = fields.count("ssm.time_step_rank"), fields.count("ssm.inner_size")
    if inner % num_values:
        fields.refuse("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank, {num_values}")
    values: dict[str, Any] = {
        "layer_types": [_KINDS[is_recurrent] for is_recurrent in _recurrent_layers(fields, num_layers)],
        "linear_num_key_heads": fields.count("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_key_head_dim": fields.count("ssm.state_size"),
        "linear_value_head_dim": inner // num_values,
        "linear_conv_kernel_dim": fields.count("ssm.conv_kernel"),
    }
    if fields.of_model("expert_count"):
        shared = fields.count("expert_shared_feed_forward_length", fields.rows_of("blk.0.ffn_gate_shexp.weight"))
        values |= {**_routing(fields, "expert_gating_func", 1), "shared_expert_intermediate_size": shared, "norm_topk_prob": True}
    return values


_KINDS = {False: "full_attention", True: "linear_attention"}


def _recurrent_layers(fields: GgufFields, num_layers: int) -> list[bool]:
    key = "attention.recurrent_layers"
    marks = fields.of_model(key)
    if marks is None:
        interval = fields.count("full_attention_interval", _INTERVAL)
        return [(layer + 1) % interval > 0 for layer in range(num_layers)]
    if not isinstance(marks, list) or len(marks) < num_layers or any(mark not in (0, 1) for mark in marks):
        fields.refuse(key, marks, f"whether each of {num_layers} layers is recurrent")
    return [bool(mark) for mark in marks[:num_layers]]


def _without_heads(fields: GgufFields, num_layers: int) -> list[bool]:
    """Layers that have no heads of keys, and so no attention."""
    counts = fields.of_model("attention.head_count_kv")
    if not isinstance(counts, list) or len(counts) < num_layers:  # there may be modules behind the layers
        fields.refuse("attention.head_count_kv", counts, f"a number for each of {num_layers} layers, 0 for those without attention")
    return [count == 0 for count in counts[:num_layers]]


def _routing(fields: GgufFields, key: str, expected: int) -> dict[str, Any]:
    if fields.of_model(key) not in (None, 0, expected):
        fields.refuse(key, fields.of_model(key), str(expected))
    return {
        "num_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
    }


def _lfm2(fields: GgufFields, num_layers: int) -> dict[str, Any]:
    if window := fields.of_model("attention.sliding_window"):
        fields.refuse("attention.sliding_window", window, "none")
    values: dict[str, Any] = {
        "layer_types": ["conv" if is_recurrent else "full_attention" for is_recurrent in _without_heads(fields, num_layers)],
        "conv_L_cache": fields.count("shortconv.l_cache"),
        "conv_bias": any(fields.has(f"blk.{block}.shortconv.conv.bias") for block in range(num_layers)),
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
    }
    if fields.architecture == "lfm2moe":
        is_normalized = fields.of_model("expert_weights_norm")
        values |= {
            **_routing(fields, "expert_gating_func", 2),
            "num_dense_layers": fields.of_model("leading_dense_block_count") or 0,
            "use_expert_bias": any(fields.has(f"blk.{block}.exp_probs_b.bias") for block in range(num_layers)),
            "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
            "norm_topk_prob": True if is_normalized is None else is_normalized,
        }
    return values


def _mamba(fields: GgufFields, num_layers: int, heads: str, size: str, state: str) -> dict[str, Any]:
    """What Mamba-2 mixers have; config.json has names of its own for their heads, the size of these, and their states."""
    num_heads, inner = fields.count("ssm.time_step_rank"), fields.count("ssm.inner_size")
    if inner % num_heads:
        fields.refuse("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank, {num_heads}")
    return {
        heads: num_heads,
        size: inner // num_heads,
        state: fields.count("ssm.state_size"),
        "mamba_n_groups": fields.count("ssm.group_count"),
        "mamba_d_conv": fields.count("ssm.conv_kernel"),
        "mamba_conv_bias": any(fields.has(f"blk.{block}.ssm_conv1d.bias") for block in range(num_layers)),
        "mamba_proj_bias": any(fields.has(f"blk.{block}.ssm_in.bias") for block in range(num_layers)),
    }


def _granite(fields: GgufFields, num_layers: int) -> dict[str, Any]:
    has_experts = bool(fields.of_model("expert_count"))
    inner, hidden = fields.count("ssm.inner_size"), fields.count("embedding_length")
    if inner % hidden:
        fields.refuse("ssm.inner_size", inner, f"a multiple of embedding_length, {hidden}")
    rotates = fields.of_model("rope.scaling.finetuned")
    shared = fields.rows_of("blk.0.ffn_up_shexp.weight" if has_experts else "blk.0.ffn_up.weight")
    values: dict[str, Any] = {
        "layer_types": ["mamba" if is_recurrent else "attention" for is_recurrent in _without_heads(fields, num_layers)],
        "position_embedding_type": "rope" if rotates is None or rotates else "nope",
        **_mamba(fields, num_layers, "mamba_n_heads", "mamba_d_head", "mamba_d_state"),
        "mamba_expand": inner // hidden,
        "shared_intermediate_size": shared,
        "num_local_experts": 0,
    }
    if has_experts:
        values |= {"num_local_experts": fields.count("expert_count"), "num_experts_per_tok": fields.count("expert_used_count")}
    return values


def _nemotron_h(fields: GgufFields, num_layers: int) -> dict[str, Any]:
    """Layers are a mixer or an MLP: those with heads of keys have attention, those with neither a width of an MLP are recurrent."""
    widths = fields.of_model("feed_forward_length")
    if not isinstance(widths, list) or len(widths) < num_layers:
        fields.refuse("feed_forward_length", widths, f"a number for each of {num_layers} layers, 0 for those without an MLP")
    kinds = []
    for layer, lacks_heads in enumerate(_without_heads(fields, num_layers)):
        mlp = "moe" if fields.has(f"blk.{layer}.ffn_gate_inp.weight") else "mlp"
        kinds.append("full_attention" if not lacks_heads else mlp if widths[layer] else "linear_attention")
    values: dict[str, Any] = {
        "layers_block_type": kinds,
        **_mamba(fields, num_layers, "mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    }
    values["use_bias"] = values.pop("mamba_proj_bias")
    if fields.of_model("expert_count"):
        num_groups, is_normalized = fields.count("expert_group_count", 1), fields.of_model("expert_weights_norm")
        values |= {
            **_routing(fields, "expert_gating_func", 2),
            "moe_shared_expert_intermediate_size": fields.count("expert_shared_feed_forward_length"),
            "moe_latent_size": fields.of_model("moe_latent_size") or None,
            "n_group": num_groups,
            "topk_group": fields.count("expert_group_used_count", 1 if num_groups == 1 else None),
            "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
            "norm_topk_prob": True if is_normalized is None else is_normalized,
        }
    return values
