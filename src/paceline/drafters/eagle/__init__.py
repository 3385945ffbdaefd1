"""EAGLE-1, EAGLE-2, EAGLE-3 and P-EAGLE heads: one network each of the first two and of the others."""

from dataclasses import replace
from pathlib import Path

from paceline.drafters.eagle.checkpoint import check_embedded
from paceline.drafters.eagle.config import read_eagle_config
from paceline.drafters.eagle.gguf import open_gguf_head
from paceline.drafters.eagle.head import EagleWeights
from paceline.drafters.eagle.variants import all_boundaries, as_named, candidates
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.pairs.config import PairVariant
from paceline.drafters.pairs.drafter import PairDrafter
from paceline.drafters.pairs.opening import PairTarget, known_calibration, settle
from paceline.drafters.pairs.parallel import ParallelDrafter
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.weights import Weights
from paceline.runtimes.base import Runtime

__all__ = ["layers_of", "open_eagle_drafter", "open_gguf_head"]


def layers_of(
    files: HeadFiles, target: Path, *, facts_directory: Path | None = None, variant: PairVariant | None = None
) -> tuple[int, ...]:
    """The boundaries of the target that a head reads, or may read while that is not known; none where it is no EAGLE-3 or P-EAGLE head.

    Args:
        target: its checkpoint.
        facts_directory: where it is kept what was found out earlier; None = nowhere.
        variant: what the user names.

    Raises:
        CheckpointError, IncompatibleDrafterError: it cannot be used with this target.
    """
    if files.kind not in (HeadKind.EAGLE3, HeadKind.PEAGLE):
        return ()
    sizes = read_model_config(target)
    config = read_eagle_config(files, sizes, variant)
    if variant is not None and variant.settles:
        return as_named(config, variant, sizes).boundaries
    admitted = candidates(files, config, sizes)
    known = known_calibration(files, target, admitted, facts_directory).get()
    return all_boundaries(admitted) if known is None else known.config.boundaries


def open_eagle_drafter(files: HeadFiles, target: PairTarget) -> PairDrafter:
    """The drafter for a head's files and a loaded target.

    Raises:
        CheckpointError, IncompatibleDrafterError: the files do not hold what a head for this target needs.
    """
    sizes = target.runtime.config
    named = target.variant
    config = read_eagle_config(files, sizes, named)
    weights = EagleWeights(
        files,
        config,
        sizes,
        _weights(target.runtime, target.directory),
        num_threads=target.num_threads,
        device=target.runtime.capabilities.device,
        quant=target.quant,
        quant_directory=target.quant_directory,
    )
    check_embedded(files, weights.embedded_ids, min(target.tokenizer.vocab_size, target.vocab_size))
    admitted = (as_named(config, named, sizes),) if named is not None and named.settles else candidates(files, config, sizes)
    config, notices = settle(files, admitted, weights.open, replace(target, vocab_size=min(target.vocab_size, weights.embedded_ids)))
    head = weights.open(config, target.max_context)
    drafter = ParallelDrafter if head.masked else PairDrafter
    return drafter(
        head,
        target.cache,
        vocab_size=target.vocab_size,
        tree_width=target.tree_width,
        collected=target.collected,
        notices=notices,
    )


def _weights(target: Runtime, directory: Path) -> Weights:
    """The target's, from the runtime that keeps them, or mapped once more."""
    weights = getattr(target, "weights", None)
    return weights if isinstance(weights, Weights) else open_weights(directory, target.config)
