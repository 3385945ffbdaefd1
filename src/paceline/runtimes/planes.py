"""Where each layer's keys and values lie in the layer caches of a cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.kv_cache.full_attention import PagedCache
from paceline.models.config import KVGroup, ModelConfig


def planes_of(config: ModelConfig, groups: Sequence[KVGroup], layer_caches: Sequence[PagedCache]) -> list[Any]:
    """Keys, then values of each layer of a network in turn, each [num_blocks, K, block_size, D]; of layers that share, those they read.

    Layers without attention have none: what stands in their place is never read.

    Args:
        groups: of the network's layers.
        layer_caches: one for each group.
    """
    without = [layer for layer in range(config.num_layers) if layer not in config.attentions]
    planes: dict[int, tuple[Any, Any]] = dict.fromkeys(without, (np.zeros((0, 0, 0, 0), np.float32),) * 2)
    for group, layer_cache in zip(groups, layer_caches, strict=True):
        for place, layer in enumerate(group.layers):
            planes[layer] = (layer_cache.storage[2 * place], layer_cache.storage[2 * place + 1])
    return [plane for layer in range(config.num_layers) for plane in planes[config.kv_owner(layer)]]
