"""How much memory a model will take, computed from the shapes of its tensors."""

import math
from dataclasses import dataclass
from typing import Any

from paceline.config import QuantOptions
from paceline.models.config import WeightType
from paceline.models.quantize import Scheme, schemes_for
from paceline.proof.checkpoint_facts import CheckpointFacts
from paceline.runtimes.backend import choose_backend
from paceline.runtimes.processor import multiplies_bf16

_LEAST_CONTEXT = 256  # tokens; with less memory than for these a model is of no use


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes one model takes once it is loaded.

    Attributes:
        weights_bytes: matrices as they are computed with, the embedding table as it is stored.
        cache_bytes_per_1k: keys and values of 1000 tokens.
        backend: what computes.
        is_quantised: whether matrices are in groups of small integers.
    """

    weights_bytes: int
    cache_bytes_per_1k: int
    backend: str
    is_quantised: bool


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What a target and its draft model take together, against what is there.

    Attributes:
        draft: None without a draft model.
        context: tokens of the longest text, all of whose keys and values `full_context_bytes` includes.
        available_bytes: memory that can be had.
    """

    target: ModelMemory
    draft: ModelMemory | None
    context: int
    available_bytes: int

    @property
    def weights_bytes(self) -> int:
        return self.target.weights_bytes + (0 if self.draft is None else self.draft.weights_bytes)

    @property
    def cache_bytes_per_1k(self) -> int:
        return self.target.cache_bytes_per_1k + (0 if self.draft is None else self.draft.cache_bytes_per_1k)

    @property
    def full_context_bytes(self) -> int:
        """Everything, with one text of full length."""
        return self.weights_bytes + self.cache_bytes_per_1k * self.context // 1000

    @property
    def context_that_fits(self) -> int:
        """Tokens of one text for which there is memory beside the weights; 0 when not even the weights fit."""
        room = self.available_bytes - self.weights_bytes
        return max(0, min(self.context, room * 1000 // max(1, self.cache_bytes_per_1k)))

    @property
    def fits(self) -> bool:
        """Whether weights and a short text find room."""
        return self.context_that_fits >= min(self.context, _LEAST_CONTEXT)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "target_weights_bytes": self.target.weights_bytes,
            "target_cache_bytes_per_1k_tokens": self.target.cache_bytes_per_1k,
            "target_backend": self.target.backend,
            "draft_weights_bytes": None if self.draft is None else self.draft.weights_bytes,
            "draft_cache_bytes_per_1k_tokens": None if self.draft is None else self.draft.cache_bytes_per_1k,
            "draft_backend": None if self.draft is None else self.draft.backend,
            "full_context_bytes": self.full_context_bytes,
            "context": self.context,
            "context_that_fits": self.context_that_fits,
            "available_bytes": self.available_bytes,
            "fits": self.fits,
        }


def estimate_memory(checkpoint: CheckpointFacts, quant: QuantOptions | None, device: str, notices: list[str]) -> ModelMemory:
    """What one model takes.

    Args:
        quant: how its matrices are quantised while it is loaded; None = not at all.
        device: "cpu" or "cuda".
        notices: gets a line where a runtime has to take over from another.
    """
    config = checkpoint.config
    schemes = {} if quant is None else schemes_for(checkpoint.weights, quant)
    is_quantised = bool(schemes) or checkpoint.is_quantised
    backend = choose_backend("auto", device, config, notices=notices)
    item_bytes = _computed_bytes(config.weight_type, backend)
    weights = _weights_bytes(checkpoint, schemes, item_bytes if backend == "openvino" and not is_quantised else None)
    cache_item_bytes = _cache_bytes(config.weight_type, backend)
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_size * cache_item_bytes * 1000
    return ModelMemory(weights, cache, backend, is_quantised)


def _computed_bytes(weight_type: WeightType, backend: str) -> int:
    """Bytes of one value where weights are not read as they are stored: OpenVINO widens what the processor cannot multiply."""
    narrow = weight_type is WeightType.BF16 and multiplies_bf16() if backend == "openvino" else weight_type is not WeightType.F32
    return 2 if narrow else 4


def _cache_bytes(weight_type: WeightType, backend: str) -> int:
    return 4 if backend == "native" else _computed_bytes(weight_type, backend)


def _weights_bytes(checkpoint: CheckpointFacts, schemes: dict[str, Scheme], widened_item_bytes: int | None) -> int:
    """Bytes of all weights: as they are stored, in groups where there is a scheme, or with so many bytes a value."""
    total = 0
    for name in checkpoint.weights:
        facts = checkpoint.weights.facts(name)
        widened = None if widened_item_bytes is None else math.prod(facts.shape) * widened_item_bytes
        if name in schemes:
            total += schemes[name].nbytes(facts.shape)
        elif widened is None:
            total += facts.nbytes
        elif name == "embedding.weight":  # rows are looked up in the file; a tied one is the output matrix as well
            total += facts.nbytes + (widened if checkpoint.config.tied_embeddings else 0)
        else:
            total += widened
    return total
