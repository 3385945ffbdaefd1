"""The loaded target, with the settings from which its drafters are created."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from paceline.runtimes.load import HeadPlacement
from paceline.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """A loaded target, and the settings for its drafters."""

    directory: Path  # directory or GGUF file of the target
    runtime: Network
    cache: KVCache  # the target's KV cache; the KV caches of heads use the same blocks and slots
    tokenizer: Tokenizer
    vocab_size: int  # V, number of token ids that the target can draw
    max_model_len: int  # maximum number of tokens of prompt plus output
    weight_bits: float = 32.0  # average bits per value of the target's matrices
    memory_bytes: int | None = None  # free memory for drafters; None = no limit
    engine: EngineConfig  # settings that the target was loaded with; drafters use the same device and threads
    speculation: SpeculationConfig  # the user's settings for drafting

    @property
    def device(self) -> str:
        """Device of the target: "cpu" or "cuda"."""
        return self.runtime.capabilities.device

    @property
    def draft_quant(self) -> QuantOptions | None:
        """How the weights of draft models and heads are quantised; None = they stay as stored."""
        return draft_quant_options(self.speculation.draft_quantization, self.weight_bits, device=self.device)

    @property
    def lm_head_copy_quant(self) -> QuantOptions | None:
        """How to quantise the target's lm_head rows that an MTP module copies for its draft vocabulary; None = they stay as stored."""
        return lm_head_copy_options(self.draft_quant, quant_options("quantization", self.engine.quantization))

    @property
    def head_options(self) -> HeadOptions:
        """The user's `--drafter-options` for heads."""
        return HeadOptions.parse(self.speculation.drafter_options)

    @property
    def copies_lm_head(self) -> bool:
        """Whether MTP and Medusa heads without an lm_head get a quantised copy of the target's: only if `draft_quantization` is set."""
        return self.speculation.draft_quantization != "auto" and self.draft_quant is not None

    @property
    def placement(self) -> HeadPlacement:
        """The target's threads, device and context length, which heads use too, and the network whose lm_head a head without one uses."""
        return HeadPlacement(
            num_threads=self.engine.num_threads, max_model_len=self.max_model_len, device=self.device, lm_head_source=self.runtime
        )

    def quantize(self, weights: Weights, files: Sequence[Path], *, uses_target_lm_head: bool = False) -> Weights:
        """Quantise the weights of a head according to the settings, and cache the result on disk.

        Args:
            files: the files that `weights` were read from; the cache is only valid while they are unchanged.
            uses_target_lm_head: `lm_head.weight` is the target's; it is quantised only if `copies_lm_head`.
        """
        options = self.draft_quant
        if options is None:
            return weights
        if uses_target_lm_head and not self.copies_lm_head:
            options = replace(options, overrides=(("lm_head.weight", None), *options.overrides))
        return quantized_weights(weights, options, cache_directory(), files=files, num_threads=self.engine.num_threads)
