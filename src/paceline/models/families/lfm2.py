"""LFM2, LFM2-MoE and LFM3: most layers have a short convolution instead of attention."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.errors import CheckpointError, shortened
from paceline.models.families.family import Family, GgufFormat, Layers, special_ids
from paceline.models.families.hybrids import MAX_CONV_KERNEL_SIZE, AnyMLP, Mixer, gguf_layer_count, layers_with_attention, mixed_layers
from paceline.models.gguf.fields import GatingFunction, GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import AttentionGate, DenseMLP, ExpertMLP, NormOrder, QKNorm, RouterScoring, ShortConvConfig


def _mlp_with_adjusted_width(builder: LayerBuilder) -> DenseMLP:
    """Return an MLP of width 2/3 * `intermediate_size` * `block_ffn_dim_multiplier`, rounded up to `block_multiple_of`.

    Source: LFM2's model in transformers 5.23.
    """
    fields, mlp = builder.fields, builder.mlp()
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return mlp
    multiple, width = fields.integer("block_multiple_of", 256), float(int(2 * mlp.intermediate_size / 3))
    if fields.values.get("block_ffn_dim_multiplier", 1.0) is None:
        multiple = 1
    else:
        width *= fields.positive_number("block_ffn_dim_multiplier", 1.0)
    if not 1 <= width < 2**31:
        raise CheckpointError(f"{fields.path}: block_ffn_dim_multiplier makes an MLP {width:g} wide, expected 1 to {2**31 - 1}")
    return replace(mlp, intermediate_size=-(-int(width) // multiple) * multiple)


def _lfm2_moe_layers(builder: LayerBuilder) -> Layers:
    fields, routing = builder.fields, builder.routing()
    routing = replace(
        routing,
        scoring=RouterScoring.SIGMOID,
        weight_sum_epsilon=1e-6 if routing.has_normalized_weights else 0.0,
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        has_correction_bias=fields.flag("use_expert_bias", default=True),
    )
    experts = ExpertMLP(routing=routing, expert=builder.mlp(width_field="moe_intermediate_size"))
    num_dense = fields.integer("num_dense_layers", min(2, builder.num_layers), minimum=0, maximum=builder.num_layers)
    return _lfm2_layers(builder, [builder.mlp() if layer < num_dense else experts for layer in range(builder.num_layers)])


def _lfm2_layers(builder: LayerBuilder, mlps: Sequence[AnyMLP]) -> Layers:
    fields = builder.fields
    full = fields.values.get("full_attn_idxs")
    full = list(range(builder.num_layers)) if full is None else full
    if not isinstance(full, list) or any(type(layer) is not int or not 0 <= layer < builder.num_layers for layer in full):
        raise CheckpointError(f"{fields.path}: full_attn_idxs = {shortened(full)}, expected numbers of layers below {builder.num_layers}")
    kinds = ["full_attention" if layer in full else "conv" for layer in range(builder.num_layers)]
    mixers: dict[str, Mixer] = {"conv": _short_convolution(builder), "full_attention": builder.attention(qk_norm=QKNorm.HEAD)}
    return mixed_layers(builder, mixers, mlps, default_types=kinds)


def _short_convolution(builder: LayerBuilder) -> ShortConvConfig:
    kernel_size = builder.fields.integer("conv_L_cache", 3, maximum=MAX_CONV_KERNEL_SIZE)
    return ShortConvConfig(channels=builder.fields.integer("hidden_size"), kernel_size=kernel_size, bias=builder.flag("conv_bias"))


def _lfm3_layers(builder: LayerBuilder) -> Layers:
    builder.require_rope_parameters()
    fields = builder.fields
    gate = AttentionGate.HEAD if fields.flag("use_attention_gate", default=True) else AttentionGate.NONE
    attention = builder.attention(bias=builder.flag("attention_bias"), qk_norm=QKNorm.HEAD, gate=gate)
    mixers: dict[str, Mixer] = {
        "conv": _short_convolution(builder),
        "full_attention": attention,
        "sliding_attention": builder.sliding_attention(attention),
    }
    usual = ("sliding_attention", "conv", "full_attention", "conv")
    kinds = ["conv" if layer == 0 else usual[layer % 4] for layer in range(builder.num_layers)]
    order = NormOrder.SANDWICH if fields.flag("use_sandwich_norm", default=True) else NormOrder.PRE
    return mixed_layers(builder, mixers, [builder.mlp()] * builder.num_layers, default_types=kinds, norm_order=order)


def _lfm2_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers = gguf_layer_count(fields, config["num_hidden_layers"])
    if window := fields.architecture_value("attention.sliding_window"):
        fields.raise_invalid("attention.sliding_window", window, "none")
    values: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "layer_types": ["full_attention" if has else "conv" for has in layers_with_attention(fields, num_layers)],
        "conv_L_cache": fields.count("shortconv.l_cache"),
        "conv_bias": fields.has_in_any_block("shortconv.conv.bias", num_layers),
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
    }
    if fields.architecture == "lfm2moe":
        values |= {
            **fields.read_experts(is_normalized=True, gating=(GatingFunction.SIGMOID,)),
            "num_dense_layers": fields.architecture_value("leading_dense_block_count") or 0,
            "use_expert_bias": fields.has_in_any_block("exp_probs_b.bias", num_layers),
            "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        }
    return values


_GGUF_FORMAT = GgufFormat(
    architectures=("lfm2",),
    read_extra_fields=_lfm2_gguf_fields,
    metadata_keys={"conv_L_cache": "shortconv.l_cache", "num_dense_layers": "leading_dense_block_count"},
    module_names={"final_norm": "token_embd_norm"},
    allows_zero_layer_sizes=True,
)
_LFM2_FAMILY = Family(
    name="lfm2",
    architecture="Lfm2ForCausalLM",
    model_names="LFM2, LFM2.5",
    build_layers=lambda builder: _lfm2_layers(builder, [_mlp_with_adjusted_width(builder)] * builder.num_layers),
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        **special_ids(1, 2),
    },
    module_names={
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
    recurrent_module="conv",
    third_party_head_methods=("dspark",),
    field_aliases={"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
    gguf=_GGUF_FORMAT,
)
FAMILIES = (
    _LFM2_FAMILY,
    replace(
        _LFM2_FAMILY,
        name="lfm2_moe",
        architecture="Lfm2MoeForCausalLM",
        model_names="LFM2-MoE",
        build_layers=_lfm2_moe_layers,
        defaults=dict(_LFM2_FAMILY.defaults, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=1792, norm_topk_prob=True),
        mlp_module="feed_forward",
        mlp_tensors={"gate.weight": "gate.weight", "router.weight": "gate.weight", "expert_bias": "gate.e_score_correction_bias"},
        gguf=replace(_GGUF_FORMAT, architectures=("lfm2moe",)),
    ),
    replace(
        _LFM2_FAMILY,
        name="lfm3",
        architecture="Lfm3ForCausalLM",
        model_names="LFM3",
        third_party_head_methods=(),
        build_layers=_lfm3_layers,
        defaults={
            **_LFM2_FAMILY.defaults,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "conv_L_cache": 7,
            "sliding_window": 256,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            },
            **special_ids(124894, 124900),
        },
        has_local_rope=True,
        requires_local_rope_parameters=True,
        has_partial_rope=True,
        module_names={
            **{name: stored for name, stored in _LFM2_FAMILY.module_names.items() if name not in ("q_norm", "k_norm", "o_proj")},
            "attention_output_norm": "post_operator_norm",
            "mlp_output_norm": "post_ffn_norm",
            "attention_gate": "self_attn.gate_proj",
        },
        loaded_module_names={"self_attn.gate_proj": "self_attn.g_proj"},
        gguf=None,
    ),
)
