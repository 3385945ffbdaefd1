"""Estimate the memory of a model from the shapes of its tensors."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import EngineConfig, QuantOptions
from paceline.models.adapters.merge import MergedWeights
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.quantize import quantization_schemes
from paceline.models.state_layout import StateLayout
from paceline.proof.checkpoint_facts import CheckpointFacts
from paceline.runtimes.load import choose_backend, default_kv_cache_dtype

_ROWS_BEYOND_WINDOW = 640
"""Rows that a sliding-window layer keeps in addition to its window: rows not yet freed, and those of a pass."""
_WANTED_ROWS = 64  # rows of the largest pass that is timed at load
_LEAST_CONTEXT = 256  # tokens; a model with room for fewer is reported as not fitting


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes one model takes once it is loaded.

    Attributes:
        weights_bytes: as they are computed with; of tables whose rows are looked up in the mapped file nothing.
        cache_bytes_per_1k: keys and values of 1000 tokens in all layers.
        backend: what computes.
        windows: of layers that keep no more, how many rows and the bytes of each.
        state_bytes: of recurrent layers, of one text however long.
        pass_bytes: what a pass over a chunk of a prompt works in.
    """

    weights_bytes: int
    cache_bytes_per_1k: int
    backend: str
    windows: tuple[tuple[int, int], ...] = ()
    state_bytes: int = 0
    pass_bytes: int = 0

    def cache_bytes(self, num_tokens: int) -> int:
        """Return the bytes of keys, values and states of one text."""
        not_kept = sum(max(0, num_tokens - rows) * row_bytes for rows, row_bytes in self.windows)
        return self.cache_bytes_per_1k * num_tokens // 1000 - not_kept + self.state_bytes


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The memory that a target and its drafters' networks need, and the memory that is available.

    Attributes:
        context: tokens of the longest text, all of whose keys and values `full_context_bytes` includes.
        available_bytes: memory that can be had.
        adapters_bytes: bytes of the LoRA adapters.
    """

    target: ModelMemory
    drafts: Sequence[ModelMemory]
    context: int
    available_bytes: int
    adapters_bytes: int = 0

    @property
    def models(self) -> list[ModelMemory]:
        return [self.target, *self.drafts]

    @property
    def weights_bytes(self) -> int:
        return self.adapters_bytes + sum(model.weights_bytes for model in self.models)

    @property
    def cache_bytes_per_1k(self) -> int:
        return sum(model.cache_bytes_per_1k for model in self.models)

    @property
    def pass_bytes(self) -> int:
        return sum(model.pass_bytes for model in self.models)

    def cache_bytes(self, num_tokens: int) -> int:
        """Keys and values of one text."""
        return sum(model.cache_bytes(num_tokens) for model in self.models)

    @property
    def full_context_bytes(self) -> int:
        """Bytes of weights, of a pass, and of the cache of one text of full length."""
        return self.weights_bytes + self.pass_bytes + self.cache_bytes(self.context)

    @property
    def context_that_fits(self) -> int:
        """Tokens of one text for which memory is left after the weights; 0 when not even the weights fit."""
        left = self.available_bytes - self.weights_bytes - self.pass_bytes
        return bisect_right(range(1, self.context + 1), left, key=self.cache_bytes)

    @property
    def fits(self) -> bool:
        """Whether weights and a short text find room."""
        return self.context_that_fits >= min(self.context, _LEAST_CONTEXT)

    def as_dict(self) -> dict[str, Any]:
        return {
            "target_weights_bytes": self.target.weights_bytes,
            "target_cache_bytes_per_1k_tokens": self.target.cache_bytes_per_1k,
            "target_windows": sorted(rows for rows, _ in self.target.windows),
            "target_state_bytes": self.target.state_bytes,
            "target_backend": self.target.backend,
            "pass_bytes": self.pass_bytes,
            "draft_weights_bytes": sum(draft.weights_bytes for draft in self.drafts) if self.drafts else None,
            "draft_cache_bytes_per_1k_tokens": sum(draft.cache_bytes_per_1k for draft in self.drafts) if self.drafts else None,
            "draft_backend": self.drafts[0].backend if self.drafts else None,
            "adapters_bytes": self.adapters_bytes,
            "full_context_bytes": self.full_context_bytes,
            "context": self.context,
            "context_that_fits": self.context_that_fits,
            "available_bytes": self.available_bytes,
            "fits": self.fits,
        }


def estimate_memory(
    checkpoint: CheckpointFacts,
    quantization: QuantOptions | None,
    device: str,
    notices: list[str],
    *,
    kv_cache_dtype: KVCacheDtype | None = None,
    is_draft: bool = False,
    max_model_len: int | None = None,
) -> ModelMemory:
    """Estimate the memory of one model.

    Args:
        quantization: how its matrices are quantised while it is loaded; None = not at all.
        device: "cpu" or "cuda".
        notices: gets a line where a runtime has to take over from another.
        kv_cache_dtype: of its keys and values; None = its own.
        is_draft: it keeps all rows, also those that have left the window.
        max_model_len: tokens of the longest text; None = what the model was made for.
    """
    config = checkpoint.config
    schemes = {} if quantization is None else quantization_schemes(checkpoint.weights, quantization)
    backend = choose_backend("auto", device, notices=notices)
    looked_up = _looked_up(checkpoint, schemes) if backend == "native" else frozenset[str]()
    weights = sum(
        schemes[name].nbytes(checkpoint.weights.tensor_info(name).shape)
        if name in schemes
        else _stored_bytes(checkpoint, name, pack_weights=backend == "native" and not schemes)
        for name in checkpoint.weights
        if name not in looked_up
    )
    natural = default_kv_cache_dtype(config, checkpoint.weights) if backend == "native" else KVCacheDtype(config.weight_type.value)
    kept = kv_cache_dtype or natural
    windows = () if backend == "torch" or is_draft else config.sliding_kv_groups
    return ModelMemory(
        weights,
        config.kv_bytes_per_token(kept) * 1000,
        backend,
        tuple((group.window + _ROWS_BEYOND_WINDOW, group.bytes_per_token(kept)) for group in windows if group.window is not None),
        4 * StateLayout.for_layers(config.recurrent_layers).num_state_values,
        _pass_bytes(checkpoint, schemes, max_model_len) if backend == "native" else 0,
    )


def _stored_bytes(checkpoint: CheckpointFacts, name: str, *, pack_weights: bool) -> int:
    """Return the bytes of a tensor that is not quantised here; GGUF blocks have the kernels' packed layout."""
    facts = checkpoint.weights.tensor_info(name)
    blocks = checkpoint.weights.stored_blocks(name) if pack_weights and facts.bits is not None else None
    if blocks is None:
        return facts.nbytes
    from paceline.runtimes.native.packed_weights import packed_bytes

    return packed_bytes(blocks)


def _looked_up(checkpoint: CheckpointFacts, schemes: Collection[str]) -> frozenset[str]:
    """Return embedding tables that stay in the mapped file: their rows are looked up, never multiplied."""
    tables, weights = ["layer_embedding.weight"], checkpoint.weights
    is_made = isinstance(weights, MergedWeights) and weights.is_changed("embedding.weight")
    if not checkpoint.config.tied_embeddings and weights.tensor_info("embedding.weight").bits is None and not is_made:
        tables.append("embedding.weight")
    return frozenset(name for name in tables if name in checkpoint.weights and name not in schemes)


def _pass_bytes(checkpoint: CheckpointFacts, schemes: Collection[str], max_model_len: int | None) -> int:
    from paceline.runtimes.native.buffers import estimate_pass_bytes

    context = min(max_model_len or checkpoint.config.max_positions, checkpoint.config.max_positions)
    num_rows = min(EngineConfig().prefill_chunk_size, context)
    wanted = min(_WANTED_ROWS, context)
    return estimate_pass_bytes(
        checkpoint.config, checkpoint.weights, schemes, num_rows=num_rows, num_logits_rows=wanted, num_positions=context
    )
