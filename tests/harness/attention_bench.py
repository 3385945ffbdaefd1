"""One layer of native attention over a cache, and what it computes by definition."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.model_configs import map_attention
from harness.native_network import Network, make_batch, native_config
from paceline.kv_cache.cache import BLOCK_SIZE
from paceline.models.config import ModelConfig
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.layers import LatentProjections
from paceline.runtimes.base import FloatArray, IntArray, RowRange

Random = np.random.Generator
NUM_BLOCKS = 64


@dataclass
class Bench:
    """One attention layer with a cache, and the rows that were run through it."""

    config: ModelConfig
    run: Network
    storage: NDArray[np.uint8]
    kv_cache_dtype: KVCacheDtype

    @classmethod
    def make(
        cls,
        heads: int,
        kv_heads: int,
        head_size: int,
        *,
        cap: float | None = None,
        window: int | None = None,
        num_threads: int = 1,
        level: str | None = None,
        kv_cache_dtype: KVCacheDtype = KVCacheDtype.F32,
        latent_size: int = 0,
    ) -> "Bench":
        config = native_config(heads=heads, kv_heads=kv_heads, head_size=head_size, soft_cap=cap)
        config = config if window is None else map_attention(config, window=window)
        if latent_size:
            latent = LatentProjections(query_rank=0, unrotated_size=1, rope_size=head_size - latent_size, value_size=1)
            config = map_attention(config, latent=latent)
        widths = [heads * head_size, kv_heads * head_size, kv_heads * head_size]
        run = Network(
            widths,
            lambda blocks, inputs: [blocks.attention(inputs[0], (inputs[1], inputs[1 if latent_size else 2]), config.attention, 0)],
            config=config,
            num_threads=num_threads,
            level=level,
        )
        shape = config.kv_groups()[0].stored_shape(NUM_BLOCKS, BLOCK_SIZE, kv_cache_dtype)
        storage = np.full(shape, 0xFF, np.uint8)  # NaN in any type: unwritten values must not be read
        run.execution.set_cache([storage[0], storage[-1]], kv_cache_dtype=kv_cache_dtype)  # the same array if values are part of the keys
        return cls(config, run, storage, kv_cache_dtype)

    def rows(self, random: Random, count: int) -> list[FloatArray]:
        """q, k and v of some rows."""
        attention = self.config.attention
        sizes = [attention.query_size, attention.kv_size, attention.kv_size]
        return [random.normal(size=(count, size)).astype(np.float32) for size in sizes]

    def attend(self, qkv: Sequence[FloatArray], ranges: Sequence[RowRange]) -> FloatArray:
        return self.run(*qkv, batch=make_batch(ranges))[0]

    def expected(self, q: FloatArray, k: FloatArray, v: FloatArray) -> NDArray[np.float64]:
        """Attention of one row q [H * D] to k and v [S, K * D], in float64."""
        config = self.config.attention
        group = config.num_heads // config.num_kv_heads
        keys, states = (side.astype(np.float64).reshape(len(k), config.num_kv_heads, config.head_size) for side in (k, v))
        states = states[..., : config.latent_size or None]
        heads = []
        for head, query in enumerate(q.astype(np.float64).reshape(config.num_heads, config.head_size)):
            scores = keys[:, head // group] @ query * config.scale
            if config.soft_cap is not None:
                scores = config.soft_cap * np.tanh(scores / config.soft_cap)
            weights = np.exp(scores - scores.max())
            heads.append(weights / weights.sum() @ states[:, head // group])
        return np.concatenate(heads)


def blocks(*numbers: int) -> IntArray:
    """A block table."""
    return np.array(numbers, np.int32)


def random_tree(random: Random, size: int) -> list[int]:
    """Parents."""
    return [-1, *sorted(int(random.integers(0, node)) for node in range(1, size))]
