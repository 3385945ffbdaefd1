"""EXAONE 4."""

from dataclasses import replace

from paceline.models.families.family import Family, GgufFormat, Layers, sliding_window_gguf_fields, special_ids
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import LayerConfig, NormOrder, QKNorm


def _exaone4_layers(builder: LayerBuilder) -> Layers:
    attention, mlp = builder.attention(qk_norm=QKNorm.HEAD), builder.mlp()
    if builder.fields.values.get("sliding_window") is None:
        return builder.layers(attention, mlp, norm_order=NormOrder.POST)
    is_sliding = builder.sliding_layers()
    layers = builder.layers(attention, mlp, norm_order=NormOrder.POST, is_sliding=is_sliding)
    without_rope = LayerConfig(mixer=replace(attention, has_rope_embedding=False), mlp=mlp, norm_order=NormOrder.POST)
    return tuple(layer if is_local else without_rope for layer, is_local in zip(layers, is_sliding, strict=True))


FAMILIES = (
    Family(
        name="exaone4",
        architecture="Exaone4ForCausalLM",
        models="EXAONE 4",
        layers=_exaone4_layers,
        defaults={
            "max_position_embeddings": 2048,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            **special_ids(0, 2),
        },
        gguf=GgufFormat(architectures=("exaone4",), read_extra_fields=sliding_window_gguf_fields),
    ),
)
