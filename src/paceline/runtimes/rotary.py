"""Tables of rotary angles, computed as far as texts have come."""

import numpy as np

from paceline.models.config import ModelConfig
from paceline.models.rope import inverse_frequencies, query_scales
from paceline.runtimes.base import FloatArray

LEAST_POSITIONS = 256


class RotaryTables:
    """cos and sin of the positions from 0 on, scaled by the attention factor and the temperature, for each of `config.rotations`.

    They hold what was asked for and at most as much again, whatever length a model says it was made for. What is added later has the bits
    it would have had at once.

    Args:
        limit: the last position there can be; at least LEAST_POSITIONS, because measurements at load run some rows of their own.

    Attributes:
        pairs: cos and sin, each [positions, R / 2] float32 and contiguous; another list whenever they have grown.
    """

    def __init__(self, config: ModelConfig, limit: int) -> None:
        self._limit = max(limit, LEAST_POSITIONS)
        self._ropes = [(rope, *inverse_frequencies(rope, head_size)) for rope, head_size in config.rotations]
        self.pairs = self._computed(0, min(LEAST_POSITIONS, self._limit) + 1)

    def reach(self, position: int) -> None:
        """Make the tables hold `position`.

        Raises:
            IndexError: it is beyond the limit, or below 0.
        """
        begin = len(self.pairs[0][0])
        if 0 <= position < begin:
            return
        if not 0 <= position <= self._limit:
            raise IndexError(f"position {position} is beyond {self._limit}, the last one that was prepared for")
        more = self._computed(begin, min(1 << position.bit_length(), self._limit + 1))
        self.pairs = [
            (np.concatenate([cos, more_cos]), np.concatenate([sin, more_sin]))
            for (cos, sin), (more_cos, more_sin) in zip(self.pairs, more, strict=True)
        ]

    def _computed(self, begin: int, end: int) -> list[tuple[FloatArray, FloatArray]]:
        positions = np.arange(begin, end, dtype=np.int64)
        tables = []
        for rope, frequencies, factor in self._ropes:
            angles = positions.astype(np.float32)[:, None] * frequencies[None, :]
            scales = np.float32(factor) * query_scales(rope, positions)[:, None]
            tables.append((np.cos(angles) * scales, np.sin(angles) * scales))
        return tables
