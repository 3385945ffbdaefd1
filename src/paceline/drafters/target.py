"""A loaded target with its settings, for which drafters are made."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import (
    EngineConfig,
    QuantOptions,
    SpeculationConfig,
    cache_directory,
    draft_quant_options,
    lm_head_copy_options,
    quant_options,
)
from paceline.drafters.options import HeadOptions
from paceline.kv_cache.cache import KVCache
from paceline.models.storage.quantized_cache import quantized_weights
from paceline.models.weights import Weights
from paceline.runtimes.base import Network
from paceline.runtimes.native.library import fastest_page_sums
from paceline.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """A loaded target.

    Attributes:
        directory: its checkpoint.
        runtime, cache: its network and key-value cache; heads keep their rows in the same blocks.
        vocab_size: V, ids that can be drawn.
        max_model_len: longest prompt + output, in tokens.
        weight_bits: bits per value of its matrices.
        memory_bytes: free memory for drafters; None = no limit.
        engine: settings it was loaded with; drafters use the same device and threads.
        speculation: settings of drafters.
    """

    directory: Path
    runtime: Network
    cache: KVCache
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    weight_bits: float = 32.0
    memory_bytes: int | None = None
    engine: EngineConfig
    speculation: SpeculationConfig

    @property
    def device(self) -> str:
        """Device of the target: "cpu" or "cuda"."""
        return self.runtime.capabilities.device

    @property
    def head_quant(self) -> QuantOptions | None:
        """How to quantise heads; None = they stay as they are stored."""
        return draft_quant_options(self.speculation.draft_quantization, None)

    @property
    def draft_model_quant(self) -> QuantOptions | None:
        """How to quantise draft models; None = they stay as they are stored."""
        return draft_quant_options(self.speculation.draft_quantization, self.weight_bits, device=self.device)

    @property
    def copy_quant(self) -> QuantOptions | None:
        """How to quantise rows that a head copies of the vocabulary matrix; None = they are read where they are stored."""
        return lm_head_copy_options(self.draft_model_quant, quant_options("quantization", self.engine.quantization))

    @property
    def head_options(self) -> HeadOptions:
        """The user's options for heads."""
        return HeadOptions.parse(self.speculation.drafter_options)

    @property
    def lm_head_of(self) -> Network | None:
        """The runtime whose lm_head is shared by heads without one; None = such heads quantise a copy."""
        return self.runtime if self.head_quant is None else None

    def quantized(self, weights: Weights, files: Sequence[Path], *, as_draft_model: bool = False) -> Weights:
        """Return the weights of a head, read from `files`, quantised by the settings for heads or for draft models."""
        options = self.draft_model_quant if as_draft_model else self.head_quant
        if options is None:
            return weights
        sums, num_threads = fastest_page_sums(), self.engine.num_threads
        return quantized_weights(weights, options, cache_directory(), files=files, num_threads=num_threads, page_sums=sums)
