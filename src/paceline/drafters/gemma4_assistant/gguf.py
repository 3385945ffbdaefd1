"""Assistants in GGUF files: what a file says in the terms of a directory, and its tensors under our names.

llama.cpp's converter names the projections `nextn.*` and leaves clusters out, others wrote `mtp.*` and have them: tensors beside the layers
are known by the end of their names, else by their shapes.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.gemma4_assistant.config import AssistantConfig
from paceline.drafters.head_containers import listed
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.errors import CheckpointError, shortened
from paceline.models.families.gemma4 import ASSISTANT_ARCHITECTURES, assistant_config
from paceline.models.gguf.config import ROPE_TENSORS
from paceline.models.gguf.file import GgufFile, open_gguf, split_parts
from paceline.models.gguf.header import GgufTensor
from paceline.models.gguf.weights import ExtraTensors, GgufWeights
from paceline.models.storage.tensor_file import ITEM_TYPES, FileTensor

_PRE, _POST, _CENTROIDS, _ORDERING = "pre_projection", "post_projection", "centroids", "ordering"
_USUAL = {
    _PRE: "nextn.pre_projection.weight",
    _POST: "nextn.post_projection.weight",
    _CENTROIDS: "masked_embd_centroids.weight",
    _ORDERING: "masked_embd_ordering",
}
_EMBEDDING, _OWN_HEAD = "token_embd.weight", "output.weight"
_OF_LAYERS = (_EMBEDDING, _OWN_HEAD, "output_norm.weight", *ROPE_TENSORS)
_NUM_BEST = 32


def open_gguf_assistant(path: Path) -> HeadFiles | None:
    """The assistant in a GGUF file, None where it holds something else.

    Its tensors are those beside the layers, by their usual names; `path` is the file of them all.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = open_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ASSISTANT_ARCHITECTURES:
        return None
    text = assistant_config(file)
    features = _features(file)
    names = _names(file, text["vocab_size"], text["hidden_size"], features)
    is_clustered = file.metadata.get(f"{architecture}.use_ordered_embeddings")
    is_clustered = (_CENTROIDS in names or _ORDERING in names) if is_clustered is None else is_clustered
    parts = tuple(_USUAL) if is_clustered else (_PRE, _POST)
    if missing := [_USUAL[part] for part in parts if part not in names]:
        raise CheckpointError(f"{file.path} lacks {listed(missing)}: it is no whole assistant; download the file again")
    config = {
        "general.architecture": architecture,
        "model_type": HeadKind.GEMMA4_ASSISTANT.value,
        "backbone_hidden_size": features,
        "use_ordered_embeddings": is_clustered,
        "text_config": text,
    }
    if is_clustered:
        count = next(iter(file.tensors[names[_CENTROIDS]].shape), 0)
        best = file.metadata.get(f"{architecture}.centroid_top_k")
        config |= {"num_centroids": count, "centroid_intermediate_top_k": min(_NUM_BEST, count) if best is None else best}
    tensors = {in_file: _tensor(file.tensors[in_file]) for in_file in names.values()}
    return HeadFiles(path, config, tensors, HeadKind.GEMMA4_ASSISTANT, split_parts(path))


def open_gguf_weights(files: HeadFiles, config: AssistantConfig, *, num_threads: int) -> tuple[GgufWeights, str]:
    """The tensors of an assistant's network, and the name in the file of the order of its tokens.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape or of a type that cannot be read.
    """
    file, layers, size = open_gguf(files.path), config.layers, config.feature_size
    names = _names(file, layers.vocab_size, layers.hidden_size, size)
    tensors = {
        "pre_projection.weight": (names[_PRE], (layers.hidden_size, 2 * size)),
        "post_projection.weight": (names[_POST], (size, layers.hidden_size)),
    }
    if config.clusters is not None:
        tensors["centroids.weight"] = names[_CENTROIDS], (config.clusters.count, layers.hidden_size)
    if _OWN_HEAD in file.tensors:  # the other one is not used then
        tensors["embedding.weight"] = _OWN_HEAD, (layers.vocab_size, layers.hidden_size)
    others = ExtraTensors(tensors, {*names.values(), _EMBEDDING}, "assistant")
    return GgufWeights(file, layers, others=others, num_threads=num_threads), names.get(_ORDERING, "")


def _features(file: GgufFile) -> int:
    """E of the target: a value, else half of what the first projection takes."""
    architecture = file.metadata["general.architecture"]
    keys = [f"{architecture}.{key}" for key in ("embedding_length_out", "n_embd_backbone")]
    size = next((file.metadata[key] for key in keys if key in file.metadata), None)
    projection = next((tensor for name, tensor in file.tensors.items() if _is_part(name, _PRE)), None)
    if size is None and projection is not None and len(projection.shape) == 2:
        return projection.shape[1] // 2
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < 2**31:
        raise CheckpointError(f"{file.path}: {keys[0]} = {shortened(size)}, expected the target's hidden size; download the file again")
    return size


def _names(file: GgufFile, vocab_size: int, hidden_size: int, features: int) -> Mapping[str, str]:
    """The name in the file of each part that is there."""
    found = {part: name for part in _USUAL for name in file.tensors if _is_part(name, part)}
    shapes: dict[str, tuple[int | None, ...]] = {  # what fits several parts is the first one's
        _PRE: (hidden_size, 2 * features),
        _POST: (features, hidden_size),
        _ORDERING: (vocab_size,),
        _CENTROIDS: (None, hidden_size),
    }
    loose = [name for name in file.tensors if not name.startswith("blk.") and name not in (*_OF_LAYERS, *found.values())]
    for part, shape in shapes.items():
        fitting = [name for name in loose if _fits(file.tensors[name].shape, shape)]
        if part not in found and len(fitting) == 1:
            found[part] = fitting[0]
            loose.remove(fitting[0])
    return found


def _is_part(name: str, part: str) -> bool:
    return name.removesuffix(".weight").endswith(part)


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(wanted in (None, size) for size, wanted in zip(shape, expected, strict=True))


def _tensor(stored: GgufTensor) -> FileTensor:
    return FileTensor(stored.shape, stored.block_type.name, partial(_values, stored))


def _values(stored: GgufTensor) -> NDArray[Any]:
    values = stored.data.view(np.dtype(ITEM_TYPES[stored.block_type.name])).reshape(stored.shape)
    return values if values.flags.aligned else values.copy()
