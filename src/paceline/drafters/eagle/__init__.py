"""EAGLE heads. EAGLE-1 and EAGLE-2 heads have one network, EAGLE-3 and P-EAGLE heads another."""

from dataclasses import replace

from paceline.drafters.eagle.checkpoint import check_embedding_rows, open_eagle_checkpoint
from paceline.drafters.eagle.config import read_eagle_config
from paceline.drafters.eagle.network import open_eagle_head
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.recurrent_heads.drafter import EagleStyleDrafter, ParallelDrafter
from paceline.drafters.target import LoadedTarget
from paceline.models.checkpoint import open_weights


def open_eagle_drafter(files: HeadFiles, target: LoadedTarget) -> EagleStyleDrafter:
    """Create the drafter for a loaded target from the files of an EAGLE head.

    Raises:
        CheckpointError: tensors or config values of the head are missing or damaged.
        IncompatibleDrafterError: the head was made for another target.
    """
    target_config = target.runtime.config
    checkpoint = open_eagle_checkpoint(files, read_eagle_config(files, target_config, target.head_options), target_config)
    check_embedding_rows(files, checkpoint.num_embedded_ids, min(target.tokenizer.vocab_size, target.vocab_size))
    checkpoint = replace(checkpoint, weights=target.quantize(checkpoint.weights, files.files))
    target_weights = target.runtime.weights or open_weights(target.directory, target_config)
    head = open_eagle_head(checkpoint, target_config, target_weights, **target.placement)
    drafter = ParallelDrafter if head.masked_pair else EagleStyleDrafter
    return drafter(head, target.cache, vocab_size=target.vocab_size, tree_width=target.speculation.tree_width)
