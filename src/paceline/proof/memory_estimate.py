"""How much memory a model will take, computed from the shapes of its tensors."""

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from paceline.config import EngineConfig, QuantOptions
from paceline.models.adapters.merge import MergedWeights
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.quantize import schemes_for
from paceline.models.state_layout import StateLayout
from paceline.proof.checkpoint_facts import CheckpointFacts
from paceline.runtimes.backend import choose_backend
from paceline.runtimes.load import default_kv_cache_dtype

_ROWS_BESIDE_WINDOW = 640
"""What a sliding layer holds beyond its window while a long text runs: rows behind it, and those of a pass."""
_WANTED_ROWS = 64  # of the largest pass that is timed at load
_LEAST_CONTEXT = 256  # tokens; with less memory than for these a model is of no use


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
        """Keys, values and states of one text."""
        not_kept = sum(max(0, num_tokens - rows) * row_bytes for rows, row_bytes in self.windows)
        return self.cache_bytes_per_1k * num_tokens // 1000 - not_kept + self.state_bytes


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What a target and its draft model take together, against what is available.

    Attributes:
        draft: None without a draft model.
        context: tokens of the longest text, all of whose keys and values `full_context_bytes` includes.
        available_bytes: memory that can be had.
        adapters_bytes: of adapters beside the target.
    """

    target: ModelMemory
    draft: ModelMemory | None
    context: int
    available_bytes: int
    adapters_bytes: int = 0

    @property
    def weights_bytes(self) -> int:
        return self.adapters_bytes + self.target.weights_bytes + (0 if self.draft is None else self.draft.weights_bytes)

    @property
    def cache_bytes_per_1k(self) -> int:
        return self.target.cache_bytes_per_1k + (0 if self.draft is None else self.draft.cache_bytes_per_1k)

    @property
    def pass_bytes(self) -> int:
        return self.target.pass_bytes + (0 if self.draft is None else self.draft.pass_bytes)

    def cache_bytes(self, num_tokens: int) -> int:
        """Keys and values of one text."""
        return self.target.cache_bytes(num_tokens) + (0 if self.draft is None else self.draft.cache_bytes(num_tokens))

    @property
    def full_context_bytes(self) -> int:
        """Everything, with one text of full length."""
        return self.weights_bytes + self.pass_bytes + self.cache_bytes(self.context)

    @property
    def context_that_fits(self) -> int:
        """Tokens of one text for which there is memory beside the weights; 0 when not even the weights fit."""
        left = self.available_bytes - self.weights_bytes - self.pass_bytes
        return bisect_right(range(1, self.context + 1), left, key=self.cache_bytes)

    @property
    def fits(self) -> bool:
        """Whether weights and a short text find room."""
        return self.context_that_fits >= min(self.context, _LEAST_CONTEXT)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "target_weights_bytes": self.target.weights_bytes,
            "target_cache_bytes_per_1k_tokens": self.target.cache_bytes_per_1k,
            "target_windows": sorted(rows for rows, _ in self.target.windows),
            "target_state_bytes": self.target.state_bytes,
            "target_backend": self.target.backend,
            "pass_bytes": self.pass_bytes,
            "draft_weights_bytes": None if self.draft is None else self.draft.weights_bytes,
            "draft_cache_bytes_per_1k_tokens": None if self.draft is None else self.draft.cache_bytes_per_1k,
            "draft_backend": None if self.draft is None else self.draft.backend,
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
    """What one model takes.

    Args:
        quantization: how its matrices are quantised while it is loaded; None = not at all.
        device: "cpu" or "cuda".
        notices: gets a line where a runtime has to take over from another.
        kv_cache_dtype: of its keys and values; None = its own.
        is_draft: it keeps all rows, also those behind windows.
        max_model_len: tokens of the longest text; None = what the model was made for.
    """
    config = checkpoint.config
    schemes = {} if quantization is None else schemes_for(checkpoint.weights, quantization)
    backend = choose_backend("auto", device, notices=notices)
    looked_up = _looked_up(checkpoint, schemes) if backend == "native" else frozenset[str]()
    weights = sum(
        schemes[name].nbytes(checkpoint.weights.facts(name).shape)
        if name in schemes
        else _stored_bytes(checkpoint, name, pack_weights=backend == "native" and not schemes)
        for name in checkpoint.weights
        if name not in looked_up
    )
    natural = default_kv_cache_dtype(config, checkpoint.weights) if backend == "native" else KVCacheDtype(config.weight_type.value)
    kept = kv_cache_dtype or natural
    windows = () if backend == "torch" or is_draft else config.windows
    return ModelMemory(
        weights,
        config.kv_bytes_per_token(kept) * 1000,
        backend,
        tuple((group.window + _ROWS_BESIDE_WINDOW, group.bytes_per_token(kept)) for group in windows if group.window is not None),
        4 * StateLayout.of(config.recurrents).state_size,
        _pass_bytes(checkpoint, schemes, max_model_len) if backend == "native" else 0,
    )


def _stored_bytes(checkpoint: CheckpointFacts, name: str, *, pack_weights: bool) -> int:
    """A tensor that stays as it is stored; blocks of a file as the kernels lay them out, where nothing is quantised further."""
    facts = checkpoint.weights.facts(name)
    blocks = checkpoint.weights.blocks(name) if pack_weights and facts.bits is not None else None
    if blocks is None:
        return facts.nbytes
    from paceline.runtimes.native.packed_weights import packed_bytes

    return packed_bytes(blocks)


def _looked_up(checkpoint: CheckpointFacts, schemes: Collection[str]) -> frozenset[str]:
    """Tables of which the rows of a pass are read in the mapped file: no product has them, and they stay as they are stored."""
    tables, weights = ["layer_embedding.weight"], checkpoint.weights
    is_made = isinstance(weights, MergedWeights) and weights.changes("embedding.weight")
    if not checkpoint.config.tied_embeddings and weights.facts("embedding.weight").bits is None and not is_made:
        tables.append("embedding.weight")
    return frozenset(name for name in tables if name in checkpoint.weights and name not in schemes)


def _pass_bytes(checkpoint: CheckpointFacts, schemes: Collection[str], max_model_len: int | None) -> int:
    from paceline.runtimes.native.buffers import pass_bytes

    context = min(max_model_len or checkpoint.config.max_positions, checkpoint.config.max_positions)
    num_rows = min(EngineConfig().prefill_chunk_size, context)
    wanted = min(_WANTED_ROWS, context)
    return pass_bytes(checkpoint.config, checkpoint.weights, schemes, num_rows=num_rows, num_logits_rows=wanted, num_positions=context)
