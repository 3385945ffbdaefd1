"""Muse Glimmer."""

from collections.abc import Mapping
from typing import Any

from paceline.errors import CheckpointError
from paceline.models.families.family import Family, GgufFormat, Layers, special_ids
from paceline.models.gguf.fields import GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import AttentionGate, NormOrder, QKNorm

_FULL_ATTENTION_INTERVAL = 4
"""Every fourth layer, counted backward from the last, has full attention without rotary embeddings."""


def _muse_glimmer_layers(builder: LayerBuilder) -> Layers:
    """Return the layers. `qk_scale_factor`, which multiplies normalised queries, is folded into the attention scale."""
    fields = builder.fields
    scale = builder.head_size**-0.5 * fields.positive_number("qk_scale_factor")
    attention = builder.attention(qk_norm=QKNorm.UNWEIGHTED_HEAD, scale=scale, gate=AttentionGate.VALUE)
    is_sliding = builder.sliding_layers(_FULL_ATTENTION_INTERVAL, first_full_layer=(builder.num_layers - 1) % _FULL_ATTENTION_INTERVAL)
    settings = {"norm_order": NormOrder.SANDWICH, "output_norm_eps": fields.epsilon("post_norm_eps", 1e-8)}
    return builder.layers(attention, builder.mlp(), is_sliding=is_sliding, has_rope=_layers_with_rope(builder), **settings)


def _layers_with_rope(builder: LayerBuilder) -> list[bool]:
    """Return for each layer whether it has rotary embeddings: those with base 0 in `layer_rope_theta` have none."""
    theta = builder.rope.theta
    # a base that is neither 0 nor the one in rope_parameters is refused: transformers would ignore it and use the latter
    thetas = builder.layer_values("layer_rope_theta", lambda own: own in (0, theta), f"0 or the rope_theta {theta:g}")
    if thetas is None:
        return [(builder.num_layers - 1 - layer) % _FULL_ATTENTION_INTERVAL > 0 for layer in range(builder.num_layers)]
    return [own != 0 for own in thetas]


def _muse_glimmer_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the family's own config.json fields. As in llama.cpp, exactly the layers with a sliding window have rotary embeddings.

    GGUF files replace `qk_scale_factor` by norm weights: every query weight is the factor, every key weight 1.
    """
    num_layers, window = config["num_hidden_layers"], fields.read_sliding_window(config["num_hidden_layers"])
    if "layer_types" not in window:
        fields.raise_invalid("attention.sliding_window_pattern", None, "for each layer whether it has a sliding window")
    theta = fields.number("rope.freq_base_swa", config["rope_theta"])
    factors = [
        {fields.constant_vector(f"blk.{layer}.attn_{part}_norm.weight", config["head_dim"]) for layer in range(num_layers)} for part in "qk"
    ]
    if len(factors[0]) > 1 or factors[1] != {1.0}:
        raise CheckpointError(
            f"{fields.file.path}: attn_q_norm and attn_k_norm are {sorted(factors[0])} and {sorted(factors[1])}, expected one factor for "
            "the queries of all layers, and 1 for keys; download the file again"
        )
    return {
        **window,
        "rope_theta": theta,
        "layer_rope_theta": [theta if kind == "sliding_attention" else 0 for kind in window["layer_types"]],
        "qk_scale_factor": factors[0].pop(),
        "output_multiplier": fields.number("logit_scale"),
        "final_logit_softcapping": fields.architecture_value("final_logit_softcapping") or None,
    }


FAMILIES = (
    Family(
        name="muse_glimmer_text",
        architecture="MuseGlimmerForConditionalGeneration",
        model_names="Muse Glimmer (text)",
        bundled_drafters=("dflash",),
        third_party_head_methods=("dflash2",),
        build_layers=_muse_glimmer_layers,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "hidden_activation": "silu",
            "rms_norm_eps": 1e-5,
            "sliding_window": 2048,
            "qk_scale_factor": 3.87,
            "lm_head_multiplier": 0.19611613513818404,
            "final_logit_softcapping": 20.0,
            **special_ids(200000, 200001),
        },
        required_field_values={"attention_bias": False},
        field_aliases={"output_multiplier": "lm_head_multiplier"},
        activation_field="hidden_activation",
        module_names={"attention_gate": "self_attn.gate_proj"},
        has_norm_offset=True,
        has_plain_final_norm=True,
        has_embedding_norm=True,
        has_logit_soft_cap=True,
        has_embedding_and_logit_multipliers=True,
        gguf=GgufFormat(
            architectures=("muse-glimmer",),
            read_extra_fields=_muse_glimmer_gguf_fields,
            metadata_keys={"output_multiplier": "logit_scale", "layer_rope_theta": "attention.sliding_window_pattern"},
            module_names={"attention_gate": "attn_gate"},
            ignored_tensors=("attn_q_norm.weight", "attn_k_norm.weight"),
            has_interleaved_rope=True,
            has_untied_output=True,
        ),
    ),
)
