"""A model whose description differs from that of its checkpoint: what a comparison of logits must notice."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.models.config import ModelConfig
from paceline.models.layers import AttentionConfig, ExpertMLP, LayerConfig

Change = Callable[[ModelConfig], ModelConfig]


def change_model(**changes: Any) -> Change:
    return lambda config: replace(config, **changes)


def map_layers(change: Callable[[LayerConfig], LayerConfig]) -> Change:
    return lambda config: replace(config, layers=tuple(map(change, config.layers)))


def change_layers(**changes: Any) -> Change:
    return map_layers(lambda layer: replace(layer, **changes))


def map_mixers(change: Callable[[Any], dict[str, Any]], kind: type = AttentionConfig) -> Change:
    """Other fields, computed from a mixer, in every mixer of a kind."""

    def changed(layer: LayerConfig) -> LayerConfig:
        mixers = {place: getattr(layer, place) for place in ("mixer", "parallel_mixer")}
        return replace(layer, **{place: replace(mixer, **change(mixer)) for place, mixer in mixers.items() if isinstance(mixer, kind)})

    return map_layers(changed)


def change_mixers(kind: type = AttentionConfig, **changes: Any) -> Change:
    return map_mixers(lambda _: changes, kind)


def change_rope(**changes: Any) -> Change:
    return map_mixers(lambda mixer: {"rope": replace(mixer.rope, **changes)})


def change_window(size: int | None) -> Change:
    """Another window in the layers that have one."""
    return map_mixers(lambda mixer: {"window": mixer.window and size})


def map_mlps(change: Callable[[Any], dict[str, Any]], kind: type = object) -> Change:
    """Other fields, computed from an MLP, in every MLP of a kind."""
    return map_layers(lambda layer: replace(layer, mlp=replace(layer.mlp, **change(layer.mlp))) if isinstance(layer.mlp, kind) else layer)


def change_mixtures(**changes: Any) -> Change:
    return map_mlps(lambda _: changes, ExpertMLP)


def change_routing(**changes: Any) -> Change:
    return map_mlps(lambda mlp: {"routing": replace(mlp.routing, **changes)}, ExpertMLP)
