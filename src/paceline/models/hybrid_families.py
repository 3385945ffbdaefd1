"""The families with recurrent layers beside attention: their part of the table in `families.py`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.errors import CheckpointError, shortened
from paceline.models.expert_families import sparse_layers
from paceline.models.family import Family
from paceline.models.json_fields import LARGEST, JsonFields
from paceline.models.layer_reader import MAX_HEAD_SIZE, LayerReader
from paceline.models.layers import (
    AttentionConfig,
    DenseMLP,
    ExpertMLP,
    GatedDeltaConfig,
    LayerConfig,
    Mamba2Config,
    QKNorm,
    Recurrent,
    Scoring,
    ShortConvConfig,
)

Layers = tuple[LayerConfig, ...]
Mixer = AttentionConfig | Recurrent
MLP = DenseMLP | ExpertMLP

MAX_HEADS = 4096
MAX_KERNEL_SIZE = 16


def _qwen3_5(read: LayerReader) -> Layers:
    return _qwen_hybrid(read, [read.mlp()] * read.num_layers)


def _qwen3_5_moe(read: LayerReader) -> Layers:
    experts = _shared_experts(read)
    return _qwen_hybrid(read, [replace(experts, routing=replace(experts.routing, is_normalized=True))] * read.num_layers)


def _qwen3_next(read: LayerReader) -> Layers:
    return _qwen_hybrid(read, sparse_layers(read, _shared_experts(read)))


def _shared_experts(read: LayerReader) -> ExpertMLP:
    shared = read.mlp(size="shared_expert_intermediate_size")
    return ExpertMLP(routing=read.routing(), expert=read.mlp(size="moe_intermediate_size"), shared=shared, gates_shared=True)


def _qwen_hybrid(read: LayerReader, mlps: Sequence[MLP]) -> Layers:
    fields, bias = read.fields, read.flag("attention_bias")
    if not fields.flag("attn_output_gate", default=True):
        raise CheckpointError(f"{fields.path}: attn_output_gate = false is not supported: attention of a {read.family.name} has a gate")
    attention = replace(read.attention(bias=bias, output_bias=bias, qk_norm=QKNorm.HEAD), is_gated=True)
    interval = fields.size("full_attention_interval", 4)
    kinds = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(read.num_layers)]
    return mixed_layers(read, {"linear_attention": _delta(read), "full_attention": attention}, mlps, kinds=kinds)


def _delta(read: LayerReader) -> GatedDeltaConfig:
    fields = read.fields
    key_heads, value_heads = (fields.size(f"linear_num_{part}_heads", most=MAX_HEADS) for part in ("key", "value"))
    if value_heads % key_heads:
        raise CheckpointError(
            f"{fields.path}: linear_num_value_heads = {value_heads} must be a multiple of linear_num_key_heads = {key_heads}"
        )
    return GatedDeltaConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_size=fields.size("linear_key_head_dim", most=MAX_HEAD_SIZE),
        value_size=fields.size("linear_value_head_dim", most=MAX_HEAD_SIZE),
        kernel_size=fields.size("linear_conv_kernel_dim", most=MAX_KERNEL_SIZE),
    )


def _lfm2(read: LayerReader) -> Layers:
    return _lfm2_layers(read, [_adjusted(read)] * read.num_layers)


def _adjusted(read: LayerReader) -> DenseMLP:
    """An MLP of two thirds of the width that is named, times a factor, rounded up.

    Source: LFM2's model in transformers 5.23.
    """
    fields, mlp = read.fields, read.mlp()
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return mlp
    multiple, width = fields.size("block_multiple_of", 256), float(int(2 * mlp.intermediate_size / 3))
    if fields.values.get("block_ffn_dim_multiplier", 1.0) is None:
        multiple = 1
    else:
        width *= fields.positive("block_ffn_dim_multiplier", 1.0)
    if not 1 <= width < 2**31:
        raise CheckpointError(f"{fields.path}: block_ffn_dim_multiplier makes an MLP {width:g} wide, expected 1 to {2**31 - 1}")
    return replace(mlp, intermediate_size=-(-int(width) // multiple) * multiple)


def _lfm2_moe(read: LayerReader) -> Layers:
    fields, routing = read.fields, read.routing()
    routing = replace(
        routing, scoring=Scoring.SIGMOID, least=1e-6 if routing.is_normalized else 0.0, factor=fields.number("routed_scaling_factor", 1.0),
        is_corrected=fields.flag("use_expert_bias", default=True),
    )  # fmt: skip
    experts = ExpertMLP(routing=routing, expert=read.mlp(size="moe_intermediate_size"))
    num_dense = fields.size("num_dense_layers", min(2, read.num_layers), least=0, most=read.num_layers)
    return _lfm2_layers(read, [read.mlp() if layer < num_dense else experts for layer in range(read.num_layers)])


def _lfm2_layers(read: LayerReader, mlps: Sequence[MLP]) -> Layers:
    fields = read.fields
    convolution = ShortConvConfig(
        channels=fields.size("hidden_size"), kernel_size=fields.size("conv_L_cache", 3, most=MAX_KERNEL_SIZE), bias=read.flag("conv_bias")
    )
    full = fields.values.get("full_attn_idxs")
    full = list(range(read.num_layers)) if full is None else full
    if not isinstance(full, list) or any(type(layer) is not int or not 0 <= layer < read.num_layers for layer in full):
        raise CheckpointError(f"{fields.path}: full_attn_idxs = {shortened(full)}, expected numbers of layers below {read.num_layers}")
    kinds = ["full_attention" if layer in full else "conv" for layer in range(read.num_layers)]
    return mixed_layers(read, {"conv": convolution, "full_attention": read.attention(qk_norm=QKNorm.HEAD)}, mlps, kinds=kinds)


def _granite_hybrid(read: LayerReader) -> Layers:
    fields, bias = read.fields, read.flag("attention_bias")
    embedding = fields.values.get("position_embedding_type")
    if embedding not in (None, "nope", "rope"):
        raise CheckpointError(f"{fields.path}: position_embedding_type = {shortened(embedding)} is not supported, only rope and nope are")
    attention = read.attention(bias=bias, output_bias=bias, scale=fields.positive("attention_multiplier", 1.0))
    attention = replace(attention, rotates=embedding == "rope")
    mamba, mlp = _granite_mamba(read), read.mlp(size="shared_intermediate_size")
    mlps: list[MLP] = [mlp] * read.num_layers
    if fields.values.get("num_local_experts") != 0:
        mlps = [ExpertMLP(routing=replace(read.routing(), is_normalized=True), expert=read.mlp(), shared=mlp)] * read.num_layers
    mixers: dict[str, Mixer] = {"mamba": mamba, "attention": attention, "linear_attention": mamba, "full_attention": attention}
    kinds = ["mamba"] * read.num_layers
    return mixed_layers(read, mixers, mlps, kinds=kinds, residual_scale=fields.positive("residual_multiplier", 1.0))


def _granite_mamba(read: LayerReader) -> Mamba2Config:
    fields = read.fields
    width, heads = fields.size("mamba_expand") * fields.size("hidden_size"), fields.size("mamba_n_heads", most=MAX_HEADS)
    given = fields.values.get("mamba_d_head")
    size = max(width // heads, 1) if given in (None, "auto") else fields.size("mamba_d_head", most=MAX_HEAD_SIZE)
    if heads * size != width:
        raise CheckpointError(
            f"{fields.path}: mamba_n_heads = {heads} of mamba_d_head = {shortened(given)} values, but mamba_expand * hidden_size = {width}"
        )
    names = {"heads": "mamba_n_heads", "groups": "mamba_n_groups", "state": "mamba_d_state", "kernel": "mamba_d_conv"}
    conv_bias = fields.flag("mamba_conv_bias", default=True)
    return mamba_mixer(read, names, head_size=size, conv_bias=conv_bias, bias=read.flag("mamba_proj_bias"))


def mamba_mixer(read: LayerReader, names: Mapping[str, str], *, head_size: int, conv_bias: bool, bias: bool) -> Mamba2Config:
    """A mixer of the sizes that fields of these names give."""
    fields = read.fields
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
        dt_limits=dt_limits(fields),
    )


def dt_limits(fields: JsonFields) -> tuple[float, float]:
    """`time_step_limit`, whose upper one may be infinite: transformers writes that in words of its own."""
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


def mixed_layers(
    read: LayerReader, mixers: Mapping[str, Mixer], mlps: Sequence[MLP], *, kinds: Sequence[str], residual_scale: float = 1.0
) -> Layers:
    """Layers with the mixers that `layer_types` names, or `kinds` where it is absent.

    Raises:
        CheckpointError: there is not one for each layer, or one is not among the mixers, or none is attention.
    """
    fields, listed = read.fields, read.fields.values.get("layer_types")
    listed = list(kinds) if listed is None else listed
    if not isinstance(listed, list) or len(listed) != read.num_layers:
        count = f"{len(listed)} layers" if isinstance(listed, list) else shortened(listed)
        raise CheckpointError(f"{fields.path}: layer_types names {count}, but num_hidden_layers = {read.num_layers}")
    for kind in listed:
        if not isinstance(kind, str) or kind not in mixers:
            raise CheckpointError(
                f"{fields.path}: layer_types names {shortened(kind)}, which is not supported for {read.family.name}; "
                f"supported are {', '.join(mixers)}"
            )
    if not any(isinstance(mixers[kind], AttentionConfig) for kind in listed):
        raise CheckpointError(f"{fields.path}: layer_types names no layer with attention: at least one of the layers needs it")
    known: dict[LayerConfig, LayerConfig] = {}
    found = (LayerConfig(mixer=mixers[kind], mlp=mlp, residual_scale=residual_scale) for kind, mlp in zip(listed, mlps, strict=True))
    return tuple(known.setdefault(layer, layer) for layer in found)


_QWEN = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_key_value_heads": 2}
_QWEN3_5 = Family(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    gguf="qwen35",
    layers=_qwen3_5,
    defaults={**_QWEN, "num_attention_heads": 16, "num_key_value_heads": 4},
    rotates_partially=True,
    norm_offset=True,
    recurrent_part="linear_attn",
)
_LFM2 = Family(
    name="lfm2",
    architecture="Lfm2ForCausalLM",
    gguf="lfm2",
    layers=_lfm2,
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    part_names={
        "attention_norm": "operator_norm",
        "mlp_norm": "ffn_norm",
        "q_norm": "self_attn.q_layernorm",
        "k_norm": "self_attn.k_layernorm",
        "o_proj": "self_attn.out_proj",
        "gate_proj": "feed_forward.w1",
        "up_proj": "feed_forward.w3",
        "down_proj": "feed_forward.w2",
        "final_norm": "model.embedding_norm",
    },
    recurrent_part="conv",
    aliases={"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
)
HYBRIDS = (
    replace(
        _QWEN3_5,
        name="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        gguf="qwen3next",
        layers=_qwen3_next,
        defaults={
            **_QWEN,
            **_QWEN_EXPERTS,
            "num_attention_heads": 16,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
    ),
    _QWEN3_5,
    replace(
        _QWEN3_5,
        name="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        gguf="qwen35moe",
        layers=_qwen3_5_moe,
        defaults={**_QWEN, **_QWEN_EXPERTS, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8},
    ),
    _LFM2,
    replace(
        _LFM2,
        name="lfm2_moe",
        architecture="Lfm2MoeForCausalLM",
        gguf="lfm2moe",
        layers=_lfm2_moe,
        defaults={**_LFM2.defaults, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "norm_topk_prob": True},
    ),
    Family(
        name="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        gguf="granitehybrid",
        layers=_granite_hybrid,
        defaults={
            "max_position_embeddings": 2048,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        part_names={
            "gate_proj": "shared_mlp.input_linear",
            "up_proj": "shared_mlp.input_linear",
            "down_proj": "shared_mlp.output_linear",
            **{f"shared_expert.{part}_proj.weight": "shared_mlp.input_linear.weight" for part in ("gate", "up")},
            "shared_expert.down_proj.weight": "shared_mlp.output_linear.weight",
        },
        has_multipliers=True,
        recurrent_part="mamba",
        aliases={"layers_block_type": "layer_types"},
    ),
)
