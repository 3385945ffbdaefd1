"""EXAONE 4."""

from dataclasses import replace

from paceline.models.families.family import Family, GgufFormat
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import LayerConfig, NormOrder, QKNorm

Layers = tuple[LayerConfig, ...]


def _exaone4_layers(build: LayerBuilder) -> Layers:
    attention, mlp = build.attention(qk_norm=QKNorm.HEAD), build.mlp()
    if build.fields.values.get("sliding_window") is None:
        return build.layers(attention, mlp, norm_order=NormOrder.POST)
    is_sliding = build.sliding_layers()
    layers = build.layers(attention, mlp, norm_order=NormOrder.POST, is_sliding=is_sliding)
    unturned = LayerConfig(mixer=replace(attention, has_rope_embedding=False), mlp=mlp, norm_order=NormOrder.POST)
    return tuple(layer if is_local else unturned for layer, is_local in zip(layers, is_sliding, strict=True))


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
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        gguf=GgufFormat(architectures=("exaone4",), read_config=lambda fields, config: fields.read_windows(config["num_hidden_layers"])),
    ),
)
