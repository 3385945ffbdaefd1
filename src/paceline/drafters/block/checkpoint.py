"""Weights of a block drafter, read from safetensors, PyTorch or GGUF files and renamed to the names of `network.py`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.block.config import (
    CONVOLUTION_MODULE_NAMES,
    SELECTOR_PREFIX,
    SINK_TENSOR_NAMES,
    TENSOR_NAME_ALIASES,
    BlockConfig,
    MarkovKind,
    is_neox_rope,
    merged_config_fields,
)  # fmt: skip
from paceline.drafters.head_files import HeadFiles, Shapes, layer_tensors, read_target_ids, rename_module
from paceline.errors import CheckpointError, shortened
from paceline.models.checkpoint import is_gguf
from paceline.models.config import ModelConfig, WeightType
from paceline.models.storage.tensor_file import read_torch_file
from paceline.models.weights import AnyTensor, Tensor, Weights, as_float32, half_split_order, take_rows

MASK_EMBEDDING_FILE = "mask_embedding.pt"
_INTERNAL_MODULE_NAMES = {
    "norm": "final_norm",
    "embed_tokens": "embedding",
    "markov_head.markov_w2": "markov_output",
    SELECTOR_PREFIX + "hidden_projection": "selector",
}
_CODEBOOK_NAMES = ("predecessor_codebook", "successor_codebook")  # tensors of DFlash2's selector, without `SELECTOR_PREFIX`
_LOOKUP_TABLE_NAMES = {
    "markov_head.markov_w1.weight": "markov_w1",
    SELECTOR_PREFIX + "predecessor_codebook": "predecessor",
    SELECTOR_PREFIX + "successor_codebook": "successor",
}
_NUMPY_MODULE_NAMES = {"markov_head.gate_proj": "gate", "markov_head.joint_proj": "joint", "confidence_head.proj": "confidence"}
"""Modules that are converted to float32 and multiplied with NumPy: name in the file -> internal name."""


@dataclass(frozen=True, slots=True)
class BlockCheckpoint:
    config: BlockConfig
    weights: Weights  # weights of the networks, by the names used in `network.py`; without lm_head if the drafter uses the target's
    lookup_tables: Mapping[str, AnyTensor]  # read by row: `markov_w1` [V, r], DFlash2's `predecessor` [V, r] and `successor` [V or Vd, r]
    numpy_tensors: Mapping[str, NDArray[np.float32]]  # modules that NumPy multiplies: `gate`, `joint` (Markov head), `confidence`
    mask_embedding: NDArray[np.float32] | None  # [E] embedding of the mask token; None = its row of the embedding table
    target_ids: NDArray[np.int64] | None  # [Vd] target id of each draft id, ascending; None = draft ids are target ids


def open_block_checkpoint(files: HeadFiles, config: BlockConfig, target: ModelConfig, *, num_threads: int = 1) -> BlockCheckpoint:
    """Open the weights and the draft vocabulary of a block drafter.

    Args:
        num_threads: threads that convert the quantised matrices of a GGUF file.

    Raises:
        CheckpointError: tensors are missing, unknown, or of the wrong shape; the error lists all of them.
    """
    files = files.with_canonical_names(TENSOR_NAME_ALIASES)
    names, required, optional, ignored = _tensor_shapes(files, config)
    files.check_shapes(required, optional)
    used = [name for name in (*required, *optional) if name in files.tensors]
    files.check_all_used([*used, *ignored])
    numpy_tensors = {name for name in used if name.rpartition(".")[0] in _NUMPY_MODULE_NAMES}
    tensors = {
        names.get(name) or rename_module(name, _INTERNAL_MODULE_NAMES): files.matrix(name, num_threads)
        for name in used
        if name not in numpy_tensors and name not in _LOOKUP_TABLE_NAMES
    }
    for name in [name for name in tensors if name.endswith("_base.weight")]:  # [2, kernel size, E]: kernels before and after a layer part
        values = np.ascontiguousarray(as_float32(tensors[name])).reshape(-1)
        tensors[name] = Tensor(values, WeightType.F32, values.shape)
    if not is_neox_rope(merged_config_fields(files)):
        _interleaved_rope_to_neox(tensors, config.layers)
    return BlockCheckpoint(
        config,
        Weights(tensors),
        {table: files.matrix(name, num_threads) for name, table in _LOOKUP_TABLE_NAMES.items() if name in used},
        {rename_module(name, _NUMPY_MODULE_NAMES): as_float32(files.matrix(name)) for name in numpy_tensors},
        None if is_gguf(files.path) else _read_mask_embedding(files.config_path.with_name(MASK_EMBEDDING_FILE), config),
        read_target_ids(files, config.layers.vocab_size, target),
    )


def _read_mask_embedding(path: Path, config: BlockConfig) -> NDArray[np.float32] | None:
    """Read the mask token's embedding [E], which replaces its row of the embedding table; None if the file does not exist."""
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise CheckpointError(f"{path} is no regular file, expected the embedding of the mask token; download it again")
    content: Any = read_torch_file(path, "mask embedding")
    row: Any = content.get("embedding") if isinstance(content, dict) else None
    if not hasattr(row, "numel") or not content.keys() <= {"embedding", "mask_token_id"}:
        content_names = shortened(sorted(map(str, content))) if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path} holds {content_names}, expected a tensor 'embedding' and a 'mask_token_id'; download it again")
    token_id = content.get("mask_token_id", config.mask_token_id)
    token_id = token_id.item() if hasattr(token_id, "numel") and token_id.numel() == 1 else token_id
    if not isinstance(token_id, int) or token_id != config.mask_token_id:
        raise CheckpointError(
            f"{path} is for mask_token_id {shortened(token_id)}, config.json has {config.mask_token_id}: one of the two belongs to "
            "another drafter"
        )
    if row.numel() != config.layers.hidden_size or not row.is_floating_point():
        raise CheckpointError(
            f"{path} holds a row of {row.numel()} values, expected {config.layers.hidden_size} numbers; download it again"
        )
    return np.asarray(row.detach().float().reshape(-1).numpy(), np.float32)


def _interleaved_rope_to_neox(tensors: dict[str, AnyTensor], layers: ModelConfig) -> None:
    """Reorder query and key rows: rotary embeddings then rotate value i with value i + size / 2 instead of with its neighbour."""
    for layer, mixer in layers.attention_layers.items():
        size, rotated = mixer.head_size, mixer.rope.rotary_size(mixer.head_size)
        for name in (f"layers.{layer}.{part}{kind}" for part in "qk" for kind in ("_proj.weight", "_proj.bias", "_norm.weight")):
            if (stored := tensors.get(name)) is not None:
                tensors[name] = take_rows(stored, half_split_order(stored.shape[0], size, rotated))


def _tensor_shapes(files: HeadFiles, config: BlockConfig) -> tuple[dict[str, str], Shapes, Shapes, Sequence[str]]:
    """Return internal names of the layers' tensors, shapes of required and of optional tensors, and names of tensors to ignore."""
    layers, hidden = config.layers, config.layers.hidden_size
    names, required, optional = _layer_tensors(files, layers)
    required["fc.weight"], optional["fc.bias"] = (hidden, config.target_hidden_size * len(config.layer_boundaries)), (hidden,)
    required |= dict.fromkeys(("hidden_norm.weight", "norm.weight"), (hidden,))
    if config.has_own_lm_head:
        required["lm_head.weight"] = (layers.vocab_size, hidden)
    if config.has_own_embedding:
        required["embed_tokens.weight"] = (files.num_rows("embed_tokens.weight"), hidden)
    rank = (files.matrix_shape("markov_head.markov_w1.weight") or (0, 0))[1]
    if config.markov is not None:
        embedded = files.num_rows("markov_head.markov_w1.weight")
        required |= {"markov_head.markov_w1.weight": (embedded, rank), "markov_head.markov_w2.weight": (layers.vocab_size, rank)}
    if config.markov is MarkovKind.GATED:
        required |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    if config.markov is MarkovKind.RNN:
        required |= {"markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden), "markov_head.joint_proj.bias": (3 * rank,)}
    if config.has_confidence:
        width = hidden + (rank if config.confidence_reads_markov_embedding else 0)
        required["confidence_head.proj.weight"], optional["confidence_head.proj.bias"] = (1, width), (1,)
    if config.num_rescored_tokens:
        rank, before, after = (files.num_rows(SELECTOR_PREFIX + name) for name in ("hidden_projection.weight", *_CODEBOOK_NAMES))
        required[SELECTOR_PREFIX + "hidden_projection.weight"] = (rank, hidden)
        required[SELECTOR_PREFIX + _CODEBOOK_NAMES[0]] = (before, rank)
        required[SELECTOR_PREFIX + _CODEBOOK_NAMES[1]] = (after if after == layers.vocab_size and "d2t" in files.tensors else before, rank)
    copies = {"embed_tokens.weight": config.has_own_embedding, "lm_head.weight": config.has_own_lm_head}
    ignored = ["d2t", "t2d", *(name for name, is_own in copies.items() if not is_own)]
    return names, required, optional, ignored


def _layer_tensors(files: HeadFiles, layers: ModelConfig) -> tuple[dict[str, str], Shapes, Shapes]:
    """Return the names and shapes of `head_files.layer_tensors`, of convolutions, and of attention sinks by their name in the file."""
    names, required, optional = layer_tensors(layers)
    for index, layer in enumerate(layers.layers):
        other, usual = (f"layers.{index}.{name}" for name in SINK_TENSOR_NAMES)
        if layer.attention.has_sinks and other in files.tensors:
            names[other], required[other] = names.pop(usual), required.pop(usual)
        if layer.convolution is None:
            continue
        size, groups = layer.convolution.kernel_size, layers.hidden_size // layer.convolution.group_size
        for part, internal in CONVOLUTION_MODULE_NAMES.items():
            base, kernels = f"layers.{index}.{part}.base_kernel", f"layers.{index}.{part}.kernel_projection.weight"
            names |= {base: f"layers.{index}.{internal}_base.weight", kernels: f"layers.{index}.{internal}_kernels.weight"}
            required |= {base: (2, size, layers.hidden_size), kernels: (2 * size * groups, layers.hidden_size)}
    return names, required, optional
