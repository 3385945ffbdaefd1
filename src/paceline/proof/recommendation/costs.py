"""What passes cost on this machine: the target's by measurement, a drafter's by its bytes.

Bytes of embeddings are not counted, because a pass reads one row of them; of experts, those that a row chooses are.
"""

import re
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.config import EngineConfig, QuantOptions
from paceline.models.config import ModelConfig
from paceline.models.layers import ExpertMLP
from paceline.models.quantize import schemes_for
from paceline.models.weights import AnyTensor, Weights
from paceline.proof.checkpoint_facts import CheckpointFacts
from paceline.proof.head_pairing import HeadFacts

if TYPE_CHECKING:
    from paceline.llm import LLM

DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8)
PASS_OVER_BYTES = 1.5
"""A pass of a small network over the time its bytes take to be read: 1.4 to 1.7 (docs/dev/experiments.md, passes of drafting heads)."""
HOST_S = 1e-4
"""Of a proposal, beside passes: 0.07 to 0.17 ms for heads, less without a network (docs/dev/experiments.md)."""

_MEASURED_BYTES = 256 << 20  # far more than the processor's caches hold
_REPEATS = 5
_EXPERT = re.compile(r"layers\.(\d+)\.experts\.")
_LOOKED_UP = ("embedding.weight", "embed_tokens.weight", "layer_embedding.weight")
_VOCABULARY_MATRICES = ("lm_head.weight", "embedding.weight")


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
    from paceline.runtimes.cost import profile_forward
    from paceline.runtimes.profile_cache import ProfileCache

    table = profile_forward(llm.runtime, llm.engine.cache, ProfileCache(cache_directory()), max_model_len=llm.max_model_len)
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


def model_bytes(facts: CheckpointFacts, quantization: QuantOptions | None) -> float:
    """What a pass of one row of a language model reads."""
    config, sizes = facts.config, _sizes(facts.weights, quantization)
    is_looked_up = {"layer_embedding.weight", *(() if config.tied_embeddings else ("embedding.weight",))}
    return sum(size * _chosen(name, config) for name, size in sizes.items() if name not in is_looked_up)


def head_bytes(head: HeadFacts, target: CheckpointFacts, quantization: QuantOptions | None) -> float:
    """What a guess of a head reads; where it has no vocabulary matrix of its own, with the target's."""
    sizes = _sizes(Weights(head.weights), quantization)
    own = sum(size for name, size in sizes.items() if name not in _LOOKED_UP)
    if any(name.endswith("lm_head.weight") for name in sizes):
        return own
    if sizes.keys() & {"embedding.weight"} and not head.cache_bytes_per_1k:  # an assistant's vocabulary matrix
        return own + sizes["embedding.weight"]
    return own + vocabulary_bytes(target, None)


def vocabulary_bytes(facts: CheckpointFacts, quantization: QuantOptions | None) -> int:
    """Bytes of the matrix that makes logits."""
    sizes = _sizes(facts.weights, quantization)
    return next(sizes[name] for name in _VOCABULARY_MATRICES if name in sizes)


def parameter_bytes(parameters: float, quantization: QuantOptions | None) -> float:
    """What a guess of a published head reads, whose files are not here: two bytes a value, or what quantising leaves."""
    return parameters * (2.0 if quantization is None else quantization.bits / 8 + 2 / quantization.group)


def _sizes(weights: Weights | Mapping[str, AnyTensor], quantization: QuantOptions | None) -> dict[str, int]:
    own = weights if isinstance(weights, Weights) else Weights(weights)
    schemes = {} if quantization is None else schemes_for(own, quantization)
    facts = {name: own.info(name) for name in own}
    return {name: schemes[name].nbytes(fact.shape) if name in schemes else fact.nbytes for name, fact in facts.items()}


def _chosen(name: str, config: ModelConfig) -> float:
    match = _EXPERT.match(name)
    mlp = config.layers[int(match[1])].mlp if match is not None else None
    return mlp.routing.num_chosen / mlp.routing.num_experts if isinstance(mlp, ExpertMLP) else 1.0
