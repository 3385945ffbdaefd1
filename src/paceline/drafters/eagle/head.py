"""EAGLE heads from their files to networks that run."""

from paceline.drafters.eagle.checkpoint import EagleCheckpoint, open_eagle
from paceline.drafters.eagle.config import EagleConfig, read_eagle_config
from paceline.drafters.eagle.network import drafted_pairs, true_pairs
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.pairs.head import MaskedPair, PairHead
from paceline.models.config import ModelConfig
from paceline.models.weights import AnyTensor, Weights
from paceline.runtimes.base import Network
from paceline.runtimes.load import open_head


class EagleWeights:
    """The tensors of a head, from which it can be opened under any of its conventions.

    Args:
        checkpoint: the head's own.
        target_weights: for matrices the head shares with the target.
        device: "cpu" or "cuda".
        lm_head_of: see `open_head`; for heads without a vocabulary matrix.
    """

    def __init__(
        self,
        checkpoint: EagleCheckpoint,
        target: ModelConfig,
        target_weights: Weights,
        *,
        num_threads: int,
        device: str = "cpu",
        lm_head_of: Network | None = None,
    ) -> None:
        self._tensors: dict[str, AnyTensor] = dict(checkpoint.weights)
        self._soft_cap = None
        self._lm_head_of = None if "lm_head.weight" in self._tensors else lm_head_of
        if "lm_head.weight" not in self._tensors:
            self._tensors["lm_head.weight"] = target_weights["embedding.weight" if target.tied_embeddings else "lm_head.weight"]
            self._soft_cap = target.logit_soft_cap
        embedding = self._tensors.pop("embedding.weight", None)
        self._embedding = target_weights["embedding.weight"] if embedding is None else embedding
        self._checkpoint, self._num_threads, self._device = checkpoint, num_threads, device

    def open(self, config: EagleConfig, max_model_len: int) -> PairHead:
        """The head under one of its conventions, prepared for `max_model_len` positions."""
        tensors = {name: tensor for name, tensor in self._tensors.items() if config.uses_fc_bias or name != "fc.bias"}
        if config.norms_feature and "feature_norm.weight" not in tensors:  # undoes speculators' move of HASS's norms
            tensors["feature_norm.weight"] = tensors["layers.0.attention_norm.weight"]
        runtime = open_head(
            true_pairs(config, self._soft_cap),
            config.layers,
            Weights(tensors),
            num_threads=self._num_threads,
            max_model_len=max_model_len,
            device=self._device,
            lm_head_of=self._lm_head_of,
        )
        mask_feature = self._checkpoint.mask_feature
        masked = None
        if config.mask_token_id is not None and mask_feature is not None:
            masked = MaskedPair(config.mask_token_id, mask_feature)
        drafted = runtime if config.is_first or masked else runtime.sibling(drafted_pairs(config, self._soft_cap))
        return PairHead(config, runtime, drafted, self._embedding, target_ids=self._checkpoint.target_ids, masked=masked)


def open_eagle_head(
    files: HeadFiles, target: ModelConfig, target_weights: Weights, *, num_threads: int, max_model_len: int, device: str = "cpu"
) -> PairHead:
    """The head in `files` by the documented defaults, with the target's matrices where it has none of its own.

    Args:
        max_model_len: positions to prepare for.
        device: "cpu" or "cuda".

    Raises:
        CheckpointError, IncompatibleDrafterError: the files do not hold what a head for this target needs.
    """
    config = read_eagle_config(files, target)
    checkpoint = open_eagle(files, config, target)
    return EagleWeights(checkpoint, target, target_weights, num_threads=num_threads, device=device).open(config, max_model_len)
