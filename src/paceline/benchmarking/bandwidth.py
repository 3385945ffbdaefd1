"""How fast this machine reads memory: what a pass that waits for its weights cannot be faster than."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

READ_BYTES = 256 << 20
"""Larger than any cache."""
REPEATS = 5


def read_bandwidth(num_threads: int) -> float:
    """Bytes a second that so many threads read together, best of `REPEATS`; each looks for the largest number of its part."""
    memory = np.ones(READ_BYTES // 8, np.uint64)
    parts = np.array_split(memory, num_threads)
    best = float("inf")
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(REPEATS):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - start)
    return memory.nbytes / best
