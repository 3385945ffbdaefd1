"""Block drafters: DFlash, DFlash2 and DSpark, which draft a whole block of tokens in one pass."""

from paceline.drafters.block.checkpoint import open_block_checkpoint
from paceline.drafters.block.config import default_sample_from_anchor, read_block_config
from paceline.drafters.block.drafter import BlockDrafter
from paceline.drafters.block.network import BlockHead
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.target import LoadedTarget
from paceline.models.checkpoint import open_weights
from paceline.models.weights import AnyTensor


def open_block_drafter(files: HeadFiles, target: LoadedTarget) -> BlockDrafter:
    """Create a block drafter for a loaded target from the drafter's files.

    Raises:
        CheckpointError: tensors or config values are missing or damaged.
        IncompatibleDrafterError: the drafter was made for another target.
    """
    target_config = target.runtime.config
    config = read_block_config(files, target_config)
    checkpoint = open_block_checkpoint(files, config, target_config, num_threads=target.engine.num_threads)
    quantized = target.quantize(checkpoint.weights, files.files)
    weights = target.runtime.weights or open_weights(target.directory, target_config)
    tensors: dict[str, AnyTensor] = dict(quantized)
    own_embedding = tensors.pop("embedding.weight", None)
    if not config.has_own_lm_head:
        tensors["lm_head.weight"] = weights["embedding.weight" if target_config.tied_embeddings else "lm_head.weight"]
    placement = target.placement
    placement["max_model_len"] += config.block_size
    placement["lm_head_source"] = None if config.has_own_lm_head else target.runtime
    head = BlockHead(checkpoint, tensors, weights["embedding.weight"] if own_embedding is None else own_embedding, **placement)
    sample_from_anchor = config.sample_from_anchor
    return BlockDrafter(
        head,
        target.cache,
        vocab_size=target.vocab_size,
        sample_from_anchor=default_sample_from_anchor(files) if sample_from_anchor is None else sample_from_anchor,
        tree_width=target.speculation.tree_width,
    )
