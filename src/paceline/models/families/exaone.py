"""EXAONE 4."""

from paceline.models.families.family import Family, GgufFormat, Layers, sliding_window_gguf_fields, special_ids
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import NormOrder, QKNorm


def _exaone4_layers(builder: LayerBuilder) -> Layers:
    attention, mlp = builder.attention(qk_norm=QKNorm.HEAD), builder.mlp()
    if builder.fields.values.get("sliding_window") is None:
        return builder.layers(attention, mlp, norm_order=NormOrder.POST)
    is_sliding = builder.sliding_layers()
    return builder.layers(attention, mlp, norm_order=NormOrder.POST, is_sliding=is_sliding, has_rope=is_sliding)


FAMILIES = (
    Family(
        name="exaone4",
        architecture="Exaone4ForCausalLM",
        model_names="EXAONE 4",
        build_layers=_exaone4_layers,
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
