"""Tables of rotary angles, computed once per runtime."""

import numpy as np

from paceline.models.config import ModelConfig
from paceline.models.rope import inverse_frequencies
from paceline.runtimes.base import FloatArray


def rotary_tables(config: ModelConfig, max_context: int) -> list[tuple[FloatArray, FloatArray]]:
    """cos and sin, each [max_context + 1, R / 2] float32 and scaled by the attention factor, for each of `config.ropes`."""
    tables = []
    for rope in config.ropes:
        frequencies, factor = inverse_frequencies(rope, config.head_size)
        angles = np.arange(max_context + 1, dtype=np.float32)[:, None] * frequencies[None, :]
        tables.append((np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)))
    return tables
