"""ERNIE 4.5."""

from paceline.models.families.family import Family, GgufFormat, Layers
from paceline.models.layer_builder import LayerBuilder


def _ernie4_5_layers(builder: LayerBuilder) -> Layers:
    bias = builder.flag("use_bias")
    return builder.layers(builder.attention(bias=bias, output_bias=bias), builder.mlp(bias=bias))


FAMILIES = (
    Family(
        name="ernie4_5",
        architecture="Ernie4_5ForCausalLM",
        models="ERNIE 4.5 0.3B",
        layers=_ernie4_5_layers,
        defaults={
            "max_position_embeddings": 131072,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        fixed_fields={"compression_ratio": 1.0},
        has_interleaved_rope=True,
        gguf=GgufFormat(
            architectures=("ernie4_5",),
            read_extra_fields=lambda fields, config: {"use_bias": config["mlp_bias"]},
            has_interleaved_rope=True,
        ),
    ),
)
