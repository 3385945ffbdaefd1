"""EAGLE heads from their files to networks that run."""

from pathlib import Path

from paceline.config import QuantOptions
from paceline.drafters.eagle.checkpoint import EagleConfig, open_eagle, read_eagle_config
from paceline.drafters.eagle.network import drafted_pairs, true_pairs
from paceline.drafters.head_files import HeadFiles, HeadKind
from paceline.drafters.pairs.head import PairHead
from paceline.models.config import ModelConfig
from paceline.models.quantized_cache import quantized_weights
from paceline.models.weights import AnyTensor, Weights
from paceline.runtimes.head import open_head
from paceline.runtimes.native.checksum import fastest_page_sums


class EagleWeights:
    """The tensors of a head, read and quantised once, from which it can be opened by any of its conventions.

    Args:
        config: what `read_eagle_config` made of `files`.
        target_weights: for the matrices the head has none of its own of.
        device: "cpu" or "cuda".
        quant: how to quantise the head's own matrices; None = they stay as they are stored.
        quant_directory: where quantised matrices are kept for the next time; None = nowhere.

    Raises:
        CheckpointError, IncompatibleDrafterError: the files do not hold what a head for this target needs.
    """

    def __init__(
        self,
        files: HeadFiles,
        config: EagleConfig,
        target: ModelConfig,
        target_weights: Weights,
        *,
        num_threads: int,
        device: str = "cpu",
        quant: QuantOptions | None = None,
        quant_directory: Path | None = None,
    ) -> None:
        checkpoint = open_eagle(files, config, target)
        weights = checkpoint.weights
        if quant is not None:
            weights = quantized_weights(
                weights, quant, quant_directory, files=files.files, num_threads=num_threads, page_sums=fastest_page_sums()
            )
        self._tensors: dict[str, AnyTensor] = dict(weights)
        self._soft_cap = None
        if "lm_head.weight" not in self._tensors:
            self._tensors["lm_head.weight"] = target_weights["embedding.weight" if target.tied_embeddings else "lm_head.weight"]
            self._soft_cap = target.logit_soft_cap
        embedding = self._tensors.pop("embedding.weight", None)
        self._embedding = target_weights["embedding.weight"] if embedding is None else embedding
        self._checkpoint, self._num_threads, self._device = checkpoint, num_threads, device

    def open(self, config: EagleConfig, max_context: int) -> PairHead:
        """The head by one of its conventions, prepared for so many positions."""
        tensors = {name: tensor for name, tensor in self._tensors.items() if config.uses_fc_bias or name != "fc.bias"}
        runtime = open_head(
            true_pairs(config, self._soft_cap),
            config.layers,
            Weights(tensors),
            num_threads=self._num_threads,
            max_context=max_context,
            device=self._device,
        )
        drafted = runtime if config.kind is HeadKind.EAGLE else runtime.beside(drafted_pairs(config, self._soft_cap))
        checkpoint = self._checkpoint
        return PairHead(config, runtime, drafted, self._embedding, target_ids=checkpoint.target_ids, notices=checkpoint.notices)


def open_eagle_head(
    files: HeadFiles, target: ModelConfig, target_weights: Weights, *, num_threads: int, max_context: int, device: str = "cpu"
) -> PairHead:
    """The head in `files` by the documented defaults, with the target's matrices where it has none of its own.

    Args:
        max_context: positions to prepare for.
        device: "cpu" or "cuda".

    Raises:
        CheckpointError, IncompatibleDrafterError: the files do not hold what a head for this target needs.
    """
    config = read_eagle_config(files, target)
    return EagleWeights(files, config, target, target_weights, num_threads=num_threads, device=device).open(config, max_context)
