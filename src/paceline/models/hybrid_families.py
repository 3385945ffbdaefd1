"""The families with recurrent layers beside attention: their part of the table in `families.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.errors import CheckpointError, shortened
from paceline.models.expert_families import sparse_layers
from paceline.models.family import Family
from paceline.models.layer_reader import MAX_HEAD_SIZE, LayerReader
from paceline.models.layers import AttentionConfig, DenseMLP, ExpertMLP, GatedDeltaConfig, LayerConfig, QKNorm, Recurrent

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
)
