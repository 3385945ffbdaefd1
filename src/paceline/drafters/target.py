"""What drafters are made for: a loaded target and the settings it was loaded with."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import (
    EngineConfig,
    QuantOptions,
    SpeculationConfig,
    cache_directory,
    copy_quant_options,
    draft_quant_options,
    quant_options,
)
from paceline.drafters.options import HeadOptions
from paceline.kv_cache.paged import KVCache
from paceline.models.quantized_cache import quantized_weights
from paceline.models.weights import Weights
from paceline.runtimes.base import Network
from paceline.runtimes.native.checksum import fastest_page_sums
from paceline.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """A loaded target.

    Attributes:
        directory: its checkpoint.
        runtime, cache: the target itself; the rows of heads lie beside its own.
        vocab_size: V, ids that can be drawn.
        max_model_len: prompt + output at most, in tokens.
        collected_layers: layer boundaries that the runtime collects, ascending.
        weight_bits: bits a value of its matrices.
        memory_bytes: that can be had beside it; None = no limit.
        engine: how it was loaded; drafters compute on the same processors.
        speculation: how to guess.
    """

    directory: Path
    runtime: Network
    cache: KVCache
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    collected_layers: tuple[int, ...] = ()
    weight_bits: float = 32.0
    memory_bytes: int | None = None
    engine: EngineConfig
    speculation: SpeculationConfig

    @property
    def device(self) -> str:
        """Where it runs: "cpu" or "cuda"."""
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
        """How to quantise rows that a head copies of the vocabulary matrix; None = it reads them where they lie."""
        return copy_quant_options(self.draft_model_quant, quant_options("quantization", self.engine.quantization))

    @property
    def head_options(self) -> HeadOptions:
        """The user's options for heads."""
        return HeadOptions.of(self.speculation.drafter_options)

    @property
    def lm_head_of(self) -> Network | None:
        """Whose vocabulary matrix heads without one may read where it lies, or copy rows of; None = heads are quantised anew."""
        return self.runtime if self.head_quant is None else None

    def quantized(self, weights: Weights, files: Sequence[Path], *, as_draft_model: bool = False) -> Weights:
        """The weights of a head, read from `files`, quantised as the settings say for heads or for draft models."""
        options = self.draft_model_quant if as_draft_model else self.head_quant
        if options is None:
            return weights
        sums, num_threads = fastest_page_sums(), self.engine.num_threads
        return quantized_weights(weights, options, cache_directory(), files=files, num_threads=num_threads, page_sums=sums)
