"""Gemma 2 and Gemma 3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import CheckpointError
from paceline.models.families.family import Family, GgufFormat, Layers
from paceline.models.gguf.fields import GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import NormOrder, QKNorm

_NUM_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""The 27B models scale scores by hidden_size / num_heads; llama.cpp recognises them by their number of layers."""


def _gemma_layers(
    builder: LayerBuilder, *, full_attention_interval: int | None = None, qk_norm: QKNorm = QKNorm.NONE, soft_cap: float | None = None
) -> Layers:
    if builder.flag("use_bidirectional_attention"):
        raise CheckpointError(f"{builder.fields.path}: use_bidirectional_attention is set: embedding models are not supported")
    bias, scale = builder.flag("attention_bias"), builder.fields.positive_number("query_pre_attn_scalar") ** -0.5
    attention = builder.attention(bias=bias, qk_norm=qk_norm, scale=scale, soft_cap=soft_cap)
    is_sliding = builder.sliding_layers(full_attention_interval)
    return builder.layers(attention, builder.mlp(), norm_order=NormOrder.SANDWICH, is_sliding=is_sliding)


def _gemma_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Gemma's own config.json fields. The metadata has no attention scale: llama.cpp derives it from the model's size."""
    is_27b = config["num_hidden_layers"] == _NUM_LAYERS_OF_27B[fields.architecture]
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    values = {
        **fields.read_layer_types(config["num_hidden_layers"]),
        "sliding_window": fields.architecture_value("attention.sliding_window"),
        "rope_local_base_freq": fields.architecture_value("rope.freq_base_swa"),
    }
    if fields.architecture == "gemma2":
        values |= {key: fields.architecture_value(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return {"query_pre_attn_scalar": scalar, **{name: value for name, value in values.items() if value is not None}}


_DEFAULT_FIELDS = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
_GEMMA2_FAMILY = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    model_names="Gemma 2",
    build_layers=lambda builder: _gemma_layers(builder, full_attention_interval=2, soft_cap=builder.soft_cap("attn_logit_softcapping")),
    defaults={**_DEFAULT_FIELDS, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    activation_field="hidden_activation",
    has_norm_offset=True,
    has_scaled_embedding=True,
    has_logit_soft_cap=True,
    gguf=GgufFormat(architectures=("gemma2",), read_extra_fields=_gemma_gguf_fields),
)
FAMILIES = (
    _GEMMA2_FAMILY,
    replace(
        _GEMMA2_FAMILY,
        name="gemma3_text",
        architecture="Gemma3ForCausalLM",
        model_names="Gemma 3 (text)",
        build_layers=lambda builder: _gemma_layers(builder, qk_norm=QKNorm.HEAD),
        defaults=dict(_DEFAULT_FIELDS, vocab_size=262208, max_position_embeddings=131072, sliding_window_pattern=6, rope_theta=1e6),
        has_local_rope=True,
        gguf=GgufFormat(architectures=("gemma3",), read_extra_fields=_gemma_gguf_fields),
    ),
)
