"""Granite 3, Granite 4 with Mamba-2 layers, and Granite Swash."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import CheckpointError, shortened
from paceline.models.families.family import Family, GgufFormat, Layers, special_ids
from paceline.models.families.hybrids import (
    MAMBA_METADATA_KEYS,
    AnyMLP,
    Mixer,
    gguf_layer_count,
    layers_with_attention,
    mamba_gguf_fields,
    mamba_mixer_of_width,
    mixed_layers,
)
from paceline.models.gguf.fields import GgufFields
from paceline.models.json_fields import MAX_FLOAT32
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import AttentionConfig, ExpertMLP, Mamba2Config, share_equal_layers


def _granite_layers(builder: LayerBuilder) -> Layers:
    scale, residual_scale = _read_attention_and_residual_scales(builder)
    attention = builder.attention(bias=builder.flag("attention_bias"), scale=scale)
    return builder.layers(attention, builder.mlp(bias=builder.flag("mlp_bias")), residual_scale=residual_scale)


def _read_attention_and_residual_scales(builder: LayerBuilder) -> tuple[float, float]:
    """Return the scale of attention scores, and the scale of mixer and MLP outputs."""
    return builder.fields.positive_number("attention_multiplier", 1.0), builder.fields.positive_number("residual_multiplier", 1.0)


def _granite_swa_layers(builder: LayerBuilder) -> Layers:
    scale, residual_scale = _read_attention_and_residual_scales(builder)
    attention = builder.attention(bias=builder.flag("attention_bias"), scale=scale, has_sinks=True)
    mlp, is_sliding = builder.mlp(bias=builder.flag("mlp_bias")), builder.sliding_layers(4, first_full_layer=0)
    layers = builder.layers(attention, mlp, is_sliding=is_sliding, residual_scale=residual_scale)
    thetas = builder.layer_values(
        "layer_rope_theta", lambda theta: type(theta) in (int, float) and 0 <= theta <= MAX_FLOAT32, "a number of 0 or more"
    )
    if thetas is None:
        return layers
    pairs = zip(layers, thetas, strict=True)
    return share_equal_layers(replace(layer, mixer=_with_rope_theta(layer.attention, float(theta))) for layer, theta in pairs)


def _with_rope_theta(attention: AttentionConfig, theta: float) -> AttentionConfig:
    """Return the same attention with another rotary base; 0 = no rotary embeddings."""
    return replace(attention, rope=replace(attention.rope, theta=theta)) if theta else replace(attention, has_rope_embedding=False)


def _granite_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    has_rope = fields.architecture_value("rope.scaling.finetuned")
    if has_rope is not None and not has_rope:  # llama.cpp writes False for models without rotary embeddings
        fields.raise_invalid("rope.scaling.finetuned", has_rope, "true")
    return _multiplier_gguf_fields(fields, config)


def _multiplier_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "attention_multiplier": fields.number("attention.scale", config["head_dim"] ** -0.5),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "logits_scaling": fields.number("logit_scale"),
    }


def _granite_hybrid_layers(builder: LayerBuilder) -> Layers:
    fields, (scale, residual_scale) = builder.fields, _read_attention_and_residual_scales(builder)
    embedding = fields.values.get("position_embedding_type")
    if embedding not in (None, "nope", "rope"):
        raise CheckpointError(f"{fields.path}: position_embedding_type = {shortened(embedding)} is not supported, only rope and nope are")
    attention = builder.attention(bias=builder.flag("attention_bias"), scale=scale, has_rope_embedding=embedding == "rope")
    mamba, mlp = _granite_mamba_mixer(builder), builder.mlp(width_field="shared_intermediate_size")
    mlps: list[AnyMLP] = [mlp] * builder.num_layers
    if fields.values.get("num_local_experts") != 0:
        routing = replace(builder.routing(), has_normalized_weights=True)
        mlps = [ExpertMLP(routing=routing, expert=builder.mlp(), shared_expert=mlp)] * builder.num_layers
    mixers: dict[str, Mixer] = {"mamba": mamba, "attention": attention, "linear_attention": mamba, "full_attention": attention}
    return mixed_layers(builder, mixers, mlps, default_types=["mamba"] * builder.num_layers, residual_scale=residual_scale)


def _granite_mamba_mixer(builder: LayerBuilder) -> Mamba2Config:
    fields = builder.fields
    width = fields.integer("mamba_expand") * fields.integer("hidden_size")
    return mamba_mixer_of_width(builder, width, "mamba_expand * hidden_size", bias=builder.flag("mamba_proj_bias"))


def _granite_hybrid_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers = gguf_layer_count(fields, config["num_hidden_layers"])
    has_experts = bool(fields.architecture_value("expert_count"))
    inner, hidden = fields.count("ssm.inner_size"), fields.count("embedding_length")
    if inner % hidden:
        fields.raise_invalid("ssm.inner_size", inner, f"a multiple of embedding_length, {hidden}")
    has_rope = fields.architecture_value("rope.scaling.finetuned")
    shared = fields.num_tensor_rows("blk.0.ffn_up_shexp.weight" if has_experts else "blk.0.ffn_up.weight")
    values: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        **_multiplier_gguf_fields(fields, config),
        "layer_types": ["attention" if has else "mamba" for has in layers_with_attention(fields, num_layers)],
        "position_embedding_type": "rope" if has_rope is None or has_rope else "nope",
        **mamba_gguf_fields(fields, num_layers),
        "mamba_expand": inner // hidden,
        "shared_intermediate_size": shared,
        "num_local_experts": 0,
    }
    if has_experts:
        values |= {"num_local_experts": fields.count("expert_count"), "num_experts_per_tok": fields.count("expert_used_count")}
    return values


FAMILIES = (
    Family(
        name="granite",
        architecture="GraniteForCausalLM",
        model_names="Granite 3",
        build_layers=_granite_layers,
        defaults={"max_position_embeddings": 2048, **special_ids(1, 2)},
        has_embedding_and_logit_multipliers=True,
        gguf=GgufFormat(architectures=("granite",), read_extra_fields=_granite_gguf_fields, has_interleaved_rope=True),
    ),
    Family(
        name="granite_swa",
        architecture="GraniteSWAForCausalLM",
        model_names="Granite Swash",
        build_layers=_granite_swa_layers,
        defaults={
            "max_position_embeddings": 8192,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "tie_word_embeddings": True,
            **special_ids(100257, 100257),
        },
        has_embedding_and_logit_multipliers=True,
    ),
    Family(
        name="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        model_names="Granite 4",
        build_layers=_granite_hybrid_layers,
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
            **special_ids(1, 2),
        },
        module_names={
            "gate_proj": "shared_mlp.input_linear",
            "up_proj": "shared_mlp.input_linear",
            "down_proj": "shared_mlp.output_linear",
            **{f"shared_expert.{part}_proj.weight": "shared_mlp.input_linear.weight" for part in ("gate", "up")},
            "shared_expert.down_proj.weight": "shared_mlp.output_linear.weight",
        },
        mlp_module="block_sparse_moe",
        mlp_tensors={
            "router.layer.weight": "gate.weight",
            "router.weight": "gate.weight",
            "input_linear.weight": "experts.gate_up_proj",
            "output_linear.weight": "experts.down_proj",
        },
        has_embedding_and_logit_multipliers=True,
        recurrent_module="mamba",
        field_aliases={"layers_block_type": "layer_types"},
        gguf=GgufFormat(
            architectures=("granitehybrid",),
            read_extra_fields=_granite_hybrid_gguf_fields,
            metadata_keys=MAMBA_METADATA_KEYS,
            has_interleaved_rope=True,
            allows_zero_layer_sizes=True,
        ),
    ),
)
