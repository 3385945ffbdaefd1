"""EAGLE heads: one network for EAGLE-1 and EAGLE-2, one for EAGLE-3 and P-EAGLE."""

from dataclasses import replace
from pathlib import Path

from paceline.drafters.eagle.checkpoint import check_embedded, open_eagle
from paceline.drafters.eagle.gguf import open_gguf_head
from paceline.drafters.eagle.head import EagleWeights
from paceline.drafters.eagle.variants import admitted, all_boundaries
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.options import HeadOptions
from paceline.drafters.pairs.drafter import PairDrafter
from paceline.drafters.pairs.opening import known_calibration, settle
from paceline.drafters.pairs.parallel import ParallelDrafter
from paceline.drafters.target import LoadedTarget
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.weights import Weights

__all__ = ["layers_of", "open_eagle_drafter", "open_gguf_head"]


def layers_of(files: HeadFiles, target: Path, options: HeadOptions) -> tuple[int, ...]:
    """The target's layer boundaries that a head reads, or may read if that is open; none unless it is an EAGLE-3 or P-EAGLE head.

    Args:
        target: its checkpoint.

    Raises:
        CheckpointError, IncompatibleDrafterError: it cannot be used with this target.
    """
    if files.kind not in (HeadKind.EAGLE3, HeadKind.PEAGLE):
        return ()
    configs = admitted(files, read_model_config(target), options.variant_for(files.kind))
    known = known_calibration(files, target, configs).get() if len(configs) > 1 else None
    return all_boundaries(configs) if known is None else known.config.boundaries


def open_eagle_drafter(files: HeadFiles, target: LoadedTarget) -> PairDrafter:
    """The drafter for a head's files and a loaded target.

    Raises:
        CheckpointError, IncompatibleDrafterError: the files do not hold what a head for this target needs.
    """
    sizes, vocab_size = target.runtime.config, target.vocab_size
    configs = admitted(files, sizes, target.head_options.variant_for(files.kind))
    opened = open_eagle(files, configs[0], sizes)
    opened = replace(opened, weights=target.quantized(opened.weights, files.files))
    weights = EagleWeights(
        opened, sizes, _weights(target), num_threads=target.engine.num_threads, device=target.device, lm_head_of=target.lm_head_of
    )
    check_embedded(files, opened.embedded_ids, min(target.tokenizer.vocab_size, vocab_size))
    config, notices = settle(files, configs, weights.open, target, min(vocab_size, opened.embedded_ids))
    head = weights.open(config, target.max_model_len)
    drafter = ParallelDrafter if head.masked else PairDrafter
    width, collected = target.speculation.tree_width, target.collected_layers
    return drafter(head, target.cache, vocab_size=vocab_size, tree_width=width, collected=collected, notices=notices)


def _weights(target: LoadedTarget) -> Weights:
    """The target's weights: the runtime's if it keeps them, else mapped again."""
    weights = getattr(target.runtime, "weights", None)
    return weights if isinstance(weights, Weights) else open_weights(target.directory, target.runtime.config)
