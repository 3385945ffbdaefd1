"""Apertus."""

from collections.abc import Mapping
from typing import Any

from paceline.models.families.family import Family, GgufFormat, Layers, special_ids
from paceline.models.gguf.fields import GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import Activation, QKNorm


def _apertus_layers(builder: LayerBuilder) -> Layers:
    builder.require_rope_parameters()
    attention = builder.attention(bias=builder.flag("attention_bias"), qk_norm=QKNorm.HEAD)
    return builder.layers(attention, builder.mlp(has_gate=False, activations={"xielu": Activation.XIELU}))


def _apertus_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters`, which files without scaling would not have."""
    return {"rope_parameters": {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}, "rope_scaling": None}


FAMILIES = (
    Family(
        name="apertus",
        architecture="ApertusForCausalLM",
        models="Apertus",
        layers=_apertus_layers,
        defaults={"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "hidden_act": "xielu", "rope_theta": 12e6, **special_ids(1, 2)},
        fixed_fields={"post_norm": False, "qk_norm": True},
        module_names={"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
        gguf=GgufFormat(architectures=("apertus",), read_extra_fields=_apertus_gguf_fields),
    ),
)
