"""The arrays that hold the keys and values of each layer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.kv_cache.full_attention import PagedCache
from paceline.models.config import KVGroup, ModelConfig


def kv_arrays_of_layers(config: ModelConfig, groups: Sequence[KVGroup], caches: Sequence[PagedCache]) -> list[Any]:
    """Return the arrays [keys of layer 0, values of layer 0, keys of layer 1, ...], each [num_blocks, K, block_size, D].

    For a layer that reads the keys and values of another layer, they are the other layer's arrays; for a layer without attention, empty.
    If values are a part of the keys, both are the same array.

    Args:
        groups: layers grouped by shape of keys, see `ModelConfig.kv_groups`.
        caches: the cache of each group.
    """
    without_attention = [layer for layer in range(config.num_layers) if layer not in config.attention_layers]
    pairs: dict[int, tuple[Any, Any]] = dict.fromkeys(without_attention, (np.zeros((0, 0, 0, 0), np.float32),) * 2)
    for group, cache in zip(groups, caches, strict=True):
        for index, layer in enumerate(group.layers):
            first = group.planes * index
            pairs[layer] = (cache.storage[first], cache.storage[first + group.planes - 1])
    return [array for layer in range(config.num_layers) for array in pairs[config.kv_source(layer)]]
