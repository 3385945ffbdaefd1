"""Hunyuan, dense."""

from paceline.models.families.family import Family, GgufFormat, Layers, special_ids
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import QKNorm


def _hunyuan_layers(builder: LayerBuilder) -> Layers:
    attention = builder.attention(bias=builder.flag("attention_bias"), qk_norm=QKNorm.HEAD_AFTER_ROPE)
    return builder.layers(attention, builder.mlp())


FAMILIES = (
    Family(
        name="hunyuan_v1_dense",
        architecture="HunYuanDenseV1ForCausalLM",
        models="Hunyuan 0.5B to 7B (dense)",
        layers=_hunyuan_layers,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, **special_ids(1, 2)},
        fixed_fields={"use_cla": False, "use_mla": False, "mlp_bias": False},
        has_rope_alpha=True,
        module_names={"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
        gguf=GgufFormat(architectures=("hunyuan-dense",)),
    ),
)
