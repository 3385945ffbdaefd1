"""Block drafters: DFlash and DSpark, which draft a whole block of tokens in one pass."""

from dataclasses import replace
from pathlib import Path

from paceline.drafters.block.checkpoint import BLOCK_KINDS, default_drafts_at_anchor, open_block, read_block_config
from paceline.drafters.block.drafter import BlockDrafter
from paceline.drafters.block.network import BlockHead
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.target import LoadedTarget
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.weights import AnyTensor, Weights

__all__ = ["BLOCK_KINDS", "read_block_layer_boundaries", "open_block_drafter"]


def read_block_layer_boundaries(files: HeadFiles, target: Path) -> tuple[int, ...]:
    """Return the target's layer boundaries that a block drafter reads.

    Args:
        target: its checkpoint.

    Raises:
        CheckpointError, IncompatibleDrafterError: it cannot be used with this target.
    """
    return read_block_config(files, read_model_config(target)).boundaries


def open_block_drafter(files: HeadFiles, target: LoadedTarget) -> BlockDrafter:
    """Open a block drafter for a loaded target.

    Raises:
        CheckpointError, IncompatibleDrafterError: the files do not hold what a drafter for this target needs.
    """
    sizes = target.runtime.config
    config = read_block_config(files, sizes)
    opened = open_block(files, config, sizes)
    quantised = target.quantized(opened.weights, files.files, as_draft_model=True)
    weights = target.runtime.weights or open_weights(target.directory, sizes)
    tensors: dict[str, AnyTensor] = dict(quantised)
    own = tensors.pop("embedding.weight", None)
    lm_head_of = None
    if not config.has_own_lm_head:
        tensors["lm_head.weight"] = weights["embedding.weight" if sizes.tied_embeddings else "lm_head.weight"]
        lm_head_of = target.runtime
    head = BlockHead(
        replace(opened, weights=Weights(tensors)),
        tensors,
        weights["embedding.weight"] if own is None else own,
        num_threads=target.engine.num_threads,
        max_model_len=target.max_model_len + config.block_size,
        device=target.device,
        lm_head_of=lm_head_of,
    )
    given = config.drafts_at_anchor
    return BlockDrafter(
        head,
        target.cache,
        vocab_size=target.vocab_size,
        drafts_at_anchor=default_drafts_at_anchor(files) if given is None else given,
        tree_width=target.speculation.tree_width,
    )
