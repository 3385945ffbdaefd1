"""OLMo 2, OLMo 3, OLMoE and Olmo Hybrid."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.models.families.experts import experts_gguf_fields
from paceline.models.families.family import Family, GgufFormat, Layers, sliding_window_gguf_fields
from paceline.models.families.hybrids import SILU_ACTIVATIONS, Mixer, delta_net_mixer, mixed_layers
from paceline.models.json_fields import JsonFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import AttentionConfig, ExpertMLP, GatedDeltaConfig, NormOrder, QKNorm, share_equal_layers


def _olmo2_layers(builder: LayerBuilder, is_sliding: Sequence[bool] = ()) -> Layers:
    attention = builder.attention(bias=builder.flag("attention_bias"), qk_norm=QKNorm.ALL_HEADS)
    return builder.layers(attention, builder.mlp(), norm_order=NormOrder.POST, is_sliding=is_sliding)


def _olmo_hybrid_layers(builder: LayerBuilder) -> Layers:
    """Return layers with gated delta nets, which use pre-norm, and layers with attention, which use post-norm."""
    fields = builder.fields
    rope = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    has_rope = {**fields.values, **rope}.get("rope_theta", 1e4) is not None  # only an explicit null disables rotary embeddings
    attention = builder.attention(bias=builder.flag("attention_bias"), qk_norm=QKNorm.ALL_HEADS, has_rope_embedding=has_rope)
    mixers: dict[str, Mixer] = {"linear_attention": _delta_net_mixer(builder), "full_attention": attention}
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(builder.num_layers)]
    kinds[-1] = kinds[-1] if "full_attention" in kinds else "full_attention"
    layers = mixed_layers(builder, mixers, [builder.mlp(activations=SILU_ACTIVATIONS)] * builder.num_layers, default_types=kinds)
    return share_equal_layers(
        replace(layer, norm_order=NormOrder.POST) if isinstance(layer.mixer, AttentionConfig) else layer for layer in layers
    )


def _delta_net_mixer(builder: LayerBuilder) -> GatedDeltaConfig:
    """Return the gated delta net. Sizes absent from config.json get the defaults of Olmo Hybrid's model in transformers 5.23."""
    values = {name: value for name, value in builder.fields.values.items() if value is not None}
    values = {**dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), builder.num_heads), **values}
    fields = JsonFields(values, builder.fields.path)
    values.setdefault("linear_key_head_dim", int(0.75 * fields.integer("hidden_size") / fields.integer("linear_num_key_heads")))
    values.setdefault("linear_value_head_dim", 2 * fields.integer("linear_key_head_dim"))
    return replace(
        delta_net_mixer(fields),
        beta_scale=2.0 if fields.flag("linear_allow_neg_eigval", default=True) else 1.0,
        has_separate_qkv_projections=True,
        norm_eps=1e-5,  # fixed: config.json's epsilon applies to all other norms
    )


def _olmoe_layers(builder: LayerBuilder) -> Layers:
    attention = builder.attention(bias=builder.flag("attention_bias"), qk_norm=QKNorm.ALL_HEADS)
    return builder.layers(attention, ExpertMLP(routing=builder.routing(), expert=builder.mlp()))


FAMILIES = (
    Family(
        name="olmo2",
        architecture="Olmo2ForCausalLM",
        model_names="OLMo 2",
        build_layers=_olmo2_layers,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
        gguf=GgufFormat(architectures=("olmo2",), read_extra_fields=sliding_window_gguf_fields, has_untied_output=True),
    ),
    Family(
        name="olmo3",
        architecture="Olmo3ForCausalLM",
        model_names="OLMo 3",
        build_layers=lambda builder: _olmo2_layers(builder, builder.sliding_layers(4)),
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "rope_local_base_freq": 5e5,
            "sliding_window": 4096,
            "eos_token_id": 50279,
        },
        has_local_rope=True,
        requires_local_rope_parameters=True,
        gguf=GgufFormat(
            architectures=("olmo2",),
            matches=lambda fields: bool(fields.architecture_value("attention.sliding_window")),
            read_extra_fields=lambda fields, config: {
                **sliding_window_gguf_fields(fields, config),
                "rope_local_base_freq": config["rope_theta"],
            },
            has_untied_output=True,
        ),
    ),
    Family(
        name="olmoe",
        architecture="OlmoeForCausalLM",
        model_names="OLMoE",
        build_layers=_olmoe_layers,
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "eos_token_id": 50279,
        },
        required_field_values={"clip_qkv": None},
        gguf=GgufFormat(architectures=("olmoe",), read_extra_fields=experts_gguf_fields, has_untied_output=True),
    ),
    Family(
        name="olmo_hybrid",
        architecture="OlmoHybridForCausalLM",
        model_names="Olmo Hybrid",
        build_layers=_olmo_hybrid_layers,
        defaults={"max_position_embeddings": 65536, "num_attention_heads": 30, "linear_conv_kernel_dim": 4, "eos_token_id": 100257},
        module_aliases={"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"},
        recurrent_module="linear_attn",
    ),
)
