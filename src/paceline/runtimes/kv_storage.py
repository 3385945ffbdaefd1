"""Which arrays hold each layer's keys and values."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.kv_cache.full_attention import PagedCache
from paceline.models.config import KVGroup, ModelConfig


def kv_arrays_of_layers(config: ModelConfig, groups: Sequence[KVGroup], caches: Sequence[PagedCache]) -> list[Any]:
    """Return the arrays [keys of layer 0, values of layer 0, keys of layer 1, ...], each [num_blocks, K, block_size, D].

    A layer that shares another's keys and values gets the other's arrays. A layer without attention gets empty ones.

    Args:
        groups: layers grouped by shape of keys, see `ModelConfig.kv_groups`.
        caches: cache of each group.
    """
    without_attention = [layer for layer in range(config.num_layers) if layer not in config.attention_layers]
    pairs: dict[int, tuple[Any, Any]] = dict.fromkeys(without_attention, (np.zeros((0, 0, 0, 0), np.float32),) * 2)
    for group, cache in zip(groups, caches, strict=True):
        for place, layer in enumerate(group.layers):
            pairs[layer] = (cache.storage[2 * place], cache.storage[2 * place + 1])
    return [array for layer in range(config.num_layers) for array in pairs[config.kv_source(layer)]]
