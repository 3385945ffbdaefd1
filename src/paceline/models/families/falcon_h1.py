"""Falcon-H1: every layer has attention and a Mamba-2 mixer in parallel, with the same input."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families.family import Family, GgufFormat, Layers, special_ids
from paceline.models.families.hybrids import MAMBA_METADATA_KEYS, SILU_ACTIVATIONS, mamba_gguf_fields, mamba_mixer_of_width
from paceline.models.gguf.fields import GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import GatedNorm, LayerConfig, Mamba2Config


def _falcon_h1_layers(builder: LayerBuilder) -> Layers:
    """Return the layers, which are all equal. Multipliers of attention inputs and keys are folded into the scales of scores and values.

    Source: Falcon-H1's model in transformers 5.23.
    """
    fields = builder.fields
    input_scale, output_scale, key_scale = (
        fields.positive_number(name, 1.0) for name in ("attention_in_multiplier", "attention_out_multiplier", "key_multiplier")
    )
    scale = float(builder.head_size**-0.5) * input_scale**2 * key_scale
    attention = builder.attention(scale=scale, value_scale=input_scale * output_scale)
    gate_scale, mlp_scale = _read_multipliers(builder, "mlp_multipliers", 2)
    mlp = replace(builder.mlp(bias=builder.flag("mlp_bias"), activations=SILU_ACTIVATIONS), gate_scale=gate_scale, output_scale=mlp_scale)
    return (LayerConfig(mixer=attention, mlp=mlp, parallel_mixer=_mamba_mixer(builder)),) * builder.num_layers


def _mamba_mixer(builder: LayerBuilder) -> Mamba2Config:
    fields = builder.fields
    width = fields.integer("mamba_d_ssm", null=fields.integer("mamba_expand") * fields.integer("hidden_size"))
    norm = GatedNorm.BEFORE_GATE if fields.flag("mamba_norm_before_gate", default=True) else GatedNorm.AFTER_GATE
    input_scale = fields.positive_number("ssm_in_multiplier", 1.0)
    gate, x, b, c, dt = (input_scale * scale for scale in _read_multipliers(builder, "ssm_multipliers", 5))
    return replace(
        mamba_mixer_of_width(builder, width, "mamba_d_ssm", bias=False),
        norm=norm if builder.flag("mamba_rms_norm") else GatedNorm.NONE,
        gate_scale=gate,
        xbc_conv_scales=(x, b, c),
        dt_scale=dt,
        output_scale=fields.positive_number("ssm_out_multiplier", 1.0),
    )


def _read_multipliers(builder: LayerBuilder, name: str, count: int) -> tuple[float, ...]:
    return (1.0,) * count if builder.fields.values.get(name) is None else builder.fields.positive_numbers(name, count)


def _falcon_h1_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Falcon-H1's own config.json fields: no multipliers, because llama.cpp's converter folds them into the weights."""
    num_layers = config["num_hidden_layers"]
    return {
        **mamba_gguf_fields(fields, num_layers),
        "mamba_d_ssm": fields.count("ssm.inner_size"),
        "mamba_rms_norm": fields.has_in_any_block("ssm_norm.weight", num_layers),
        "mamba_norm_before_gate": False,
    }


FAMILIES = (
    Family(
        name="falcon_h1",
        architecture="FalconH1ForCausalLM",
        model_names="Falcon-H1",
        build_layers=_falcon_h1_layers,
        defaults={
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            **special_ids(1, 2),
        },
        required_field_values={"attention_bias": False, "mamba_proj_bias": False, "projectors_bias": False},
        module_names={
            "final_norm": "model.final_layernorm",
            "mlp_norm": "pre_ff_layernorm",
            **{name: f"feed_forward.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
        },
        has_embedding_and_logit_multipliers=True,
        recurrent_module="mamba",
        gguf=GgufFormat(
            architectures=("falcon-h1",),
            read_extra_fields=_falcon_h1_gguf_fields,
            metadata_keys={**MAMBA_METADATA_KEYS, "mamba_d_ssm": "ssm.inner_size"},
        ),
    ),
)
