"""Descriptions of small networks, made without a checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.config import ModelConfig, WeightType
from paceline.models.layers import AttentionConfig, DenseMLP, LayerConfig, NormOrder
from paceline.models.rope_config import RopeConfig


def make_config(
    *,
    num_layers: int = 1,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    rope: RopeConfig = RopeConfig(),  # noqa: B008
    intermediate_size: int = 96,
    norm_order: NormOrder = NormOrder.PRE,
    attention: Mapping[str, Any] | None = None,
    mlp: Mapping[str, Any] | None = None,
    **whole: Any,
) -> ModelConfig:
    """A network whose layers are alike.

    Args:
        attention, mlp: further fields of `AttentionConfig` and `DenseMLP`.
        whole: fields of `ModelConfig`.
    """
    sizes: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size, "rope": rope}
    mixer = AttentionConfig(**{**sizes, "scale": float(head_size**-0.5), **(attention or {})})
    layer = LayerConfig(mixer=mixer, mlp=DenseMLP(intermediate_size=intermediate_size, **(mlp or {})), norm_order=norm_order)
    fields = {
        "family": "llama", "vocab_size": 97, "hidden_size": 64, "norm_eps": 1e-5, "max_positions": 512, "weight_type": WeightType.F32,
    }  # fmt: skip
    return ModelConfig(**{**fields, **whole, "layers": (layer,) * num_layers})


def map_attention(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The same with other fields of every layer's attention."""
    return config.map_attention(lambda attention: replace(attention, **changes))
