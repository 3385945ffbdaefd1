"""EAGLE heads: one network for EAGLE-1 and EAGLE-2, one for EAGLE-3 and P-EAGLE."""

from dataclasses import replace
from pathlib import Path

from paceline.drafters.eagle.checkpoint import check_embedded, open_eagle
from paceline.drafters.eagle.config import read_eagle_config
from paceline.drafters.eagle.network import open_eagle_head
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.options import HeadOptions
from paceline.drafters.recurrent_heads.drafter import EagleStyleDrafter, ParallelDrafter
from paceline.drafters.target import LoadedTarget
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.weights import Weights


def read_eagle_layer_boundaries(files: HeadFiles, target: Path, options: HeadOptions) -> tuple[int, ...]:
    """Return the target's layer boundaries that a head reads; none unless it is an EAGLE-3 or P-EAGLE head.

    Args:
        target: its checkpoint.

    Raises:
        CheckpointError, IncompatibleDrafterError: it cannot be used with this target.
    """
    if files.kind not in (HeadKind.EAGLE3, HeadKind.PEAGLE):
        return ()
    return read_eagle_config(files, read_model_config(target), options).boundaries


def open_eagle_drafter(files: HeadFiles, target: LoadedTarget) -> EagleStyleDrafter:
    """Open the drafter for a head's files and a loaded target.

    Raises:
        CheckpointError, IncompatibleDrafterError: the files do not hold what a head for this target needs.
    """
    sizes = target.runtime.config
    checkpoint = open_eagle(files, read_eagle_config(files, sizes, target.head_options), sizes)
    check_embedded(files, checkpoint.embedded_ids, min(target.tokenizer.vocab_size, target.vocab_size))
    checkpoint = replace(checkpoint, weights=target.quantized(checkpoint.weights, files.files))
    kept = getattr(target.runtime, "weights", None)  # target weights, if the runtime keeps them
    head = open_eagle_head(
        checkpoint,
        sizes,
        kept if isinstance(kept, Weights) else open_weights(target.directory, sizes),
        num_threads=target.engine.num_threads,
        max_model_len=target.max_model_len,
        device=target.device,
        lm_head_of=target.lm_head_of,
    )
    drafter = ParallelDrafter if head.masked else EagleStyleDrafter
    return drafter(head, target.cache, vocab_size=target.vocab_size, tree_width=target.speculation.tree_width)
