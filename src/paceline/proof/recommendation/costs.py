"""What passes cost on this machine: the target's by measurement, a drafter's by its bytes."""

import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.config import EngineConfig

if TYPE_CHECKING:
    from paceline.llm import LLM

DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8)
PASS_OVER_BYTES = 1.5
"""A pass of a small network over the time its bytes take to be read: 1.4 to 1.7 (docs/dev/experiments.md, passes of drafting heads)."""
HOST_S = 1e-4
"""Of a proposal, beside passes: 0.07 to 0.17 ms for heads, less without a network (docs/dev/experiments.md)."""

_MEASURED_BYTES = 256 << 20  # far more than the processor's caches hold
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """What was measured.

    Attributes:
        pass_s: seconds of a target pass by its number of rows: 1, and those of each draft length.
        bytes_per_s: at which memory is read by all threads.
        target_bytes: what the target's pass of one row reads.
    """

    pass_s: Mapping[int, float]
    bytes_per_s: float
    target_bytes: float

    def draft_pass_s(self, num_bytes: float) -> float:
        """Seconds of a pass of a drafter's network that reads so many bytes: not quicker, byte for byte, than the target's own pass."""
        least = self.target_bytes / self.bytes_per_s
        return max(PASS_OVER_BYTES, self.pass_s[1] / least) * num_bytes / self.bytes_per_s


def measure_costs(target_bytes: float, **arguments: Any) -> MachineCosts:
    """Load a target without drafters and time its passes.

    Args:
        target_bytes: what a pass of one row reads.
        arguments: of `paceline.LLM`.

    Raises:
        PacelineError: it cannot be loaded.
    """
    from paceline.llm import LLM

    with LLM(**arguments, drafter="none") as llm:
        passes = _pass_times(llm)
    return MachineCosts(passes, _bytes_per_s(EngineConfig(threads=arguments.get("threads")).num_threads), target_bytes)


def _pass_times(llm: "LLM") -> Mapping[int, float]:
    """Seconds of a pass by its rows, by the table that decides how much is drafted."""
    from paceline.config import cache_directory
    from paceline.runtimes.cost import pass_table
    from paceline.runtimes.facts import MeasuredFacts

    table = pass_table(llm.runtime, llm.engine.cache, MeasuredFacts(cache_directory()), max_context=llm.max_context)
    return {count: table.at(count) for count in (1, *(length + 1 for length in DRAFT_LENGTHS))}


def _bytes_per_s(num_threads: int) -> float:
    memory = np.ones(_MEASURED_BYTES // 8, np.uint64)
    parts = np.array_split(memory, num_threads)
    times = []
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(_REPEATS):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            times.append(time.perf_counter() - start)
    return _MEASURED_BYTES / statistics.median(times)
