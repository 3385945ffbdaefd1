"""Where each layer's keys and values lie in the memories of a cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.kv_cache.key_values import PagedRows
from paceline.models.config import KVGroup, ModelConfig


def planes_of(config: ModelConfig, groups: Sequence[KVGroup], memories: Sequence[PagedRows]) -> list[Any]:
    """Keys, then values of each layer of a network in turn, each [num_blocks, K, block_size, D]; of layers that share, those they read.

    Layers without attention have none: what stands in their place is never read.

    Args:
        groups: of the network's layers.
        memories: of each group.
    """
    without = [layer for layer in range(config.num_layers) if layer not in config.attentions]
    planes: dict[int, tuple[Any, Any]] = dict.fromkeys(without, (np.zeros((0, 0, 0, 0), np.float32),) * 2)
    for group, memory in zip(groups, memories, strict=True):
        for place, layer in enumerate(group.layers):
            planes[layer] = (memory.storage[2 * place], memory.storage[2 * place + 1])
    return [plane for layer in range(config.num_layers) for plane in planes[config.kv_owner(layer)]]
