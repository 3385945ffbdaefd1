"""The tensors of an assistant under our names."""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.gemma4_assistant.config import AssistantConfig, read_assistant
from paceline.drafters.gemma4_assistant.gguf import open_gguf_weights
from paceline.drafters.head_files import HeadFiles
from paceline.errors import CheckpointError
from paceline.models.checkpoint import is_gguf
from paceline.models.config import ModelConfig
from paceline.models.families.gemma4 import METADATA_KEYS
from paceline.models.gguf.config import with_metadata_keys
from paceline.models.tensor_names import checkpoint_names, tensor_shapes
from paceline.models.weights import Weights

_ORDERING = "masked_embedding.token_ordering"
_HEAD = "lm_head.weight"
_UNUSED = re.compile(r"layers\.[0-9]{1,6}\.self_attn\.(k_proj|v_proj|k_norm)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Assistant:
    """A loaded assistant.

    Attributes:
        weights: under the names of its network; `embedding.weight` is the vocabulary matrix, and nothing is looked up in it.
        token_ordering: [V] the token ids, cluster by cluster; None = it has no clusters.
    """

    config: AssistantConfig
    weights: Weights
    token_ordering: NDArray[np.int64] | None


def load_assistant(files: HeadFiles, target: ModelConfig, *, num_threads: int = 1) -> Assistant:
    """The assistant in some files, for a target.

    Args:
        num_threads: to convert a GGUF file's matrices with.

    Raises:
        CheckpointError: tensors are missing, of another shape, or unknown.
        IncompatibleDrafterError: it was made for another target.
    """
    if not is_gguf(files.path):
        return _of_directory(files, read_assistant(files, target))
    try:
        config = read_assistant(files, target)
    except CheckpointError as error:
        raise with_metadata_keys(error, files.config["general.architecture"], METADATA_KEYS) from None
    weights, ordering = open_gguf_weights(files, config, num_threads=num_threads)
    return Assistant(config, weights, None if config.clusters is None else _ordering(files, ordering, config.layers.vocab_size))


def _of_directory(files: HeadFiles, config: AssistantConfig) -> Assistant:
    layers, size = config.layers, config.feature_size
    shapes = dict(tensor_shapes(layers))
    names = {name: theirs.removeprefix("model.") for name, theirs in checkpoint_names(layers).items()}
    shapes |= {"pre_projection.weight": (layers.hidden_size, 2 * size), "post_projection.weight": (size, layers.hidden_size)}
    names |= {name: name for name in ("pre_projection.weight", "post_projection.weight")}
    needed: dict[str, tuple[int, ...]] = {}
    if config.clusters is not None:
        shapes["centroids.weight"] = (config.clusters.count, layers.hidden_size)
        names["centroids.weight"] = "masked_embedding.centroids.weight"
        needed[_ORDERING] = (layers.vocab_size,)
    if _HEAD in files.tensors:  # tied to the other one, which may be missing then
        names["embedding.weight"] = _HEAD
    files.check({names[name]: shape for name, shape in shapes.items()} | needed)
    known = {*names.values(), *needed, "embed_tokens.weight"}
    files.check_all_used(known, ignored=lambda name: _UNUSED.fullmatch(name) is not None or name.startswith("masked_embedding."))
    weights = Weights({name: files.weight(theirs) for name, theirs in names.items()})
    return Assistant(config, weights, _ordering(files, _ORDERING, layers.vocab_size) if needed else None)


def _ordering(files: HeadFiles, name: str, vocab_size: int) -> NDArray[np.int64]:
    ordering = files.table(name)
    if not np.array_equal(np.sort(ordering), np.arange(vocab_size)):
        raise CheckpointError(f"{files.path}: {name} does not hold each of the {vocab_size} token ids once: download the file again")
    return ordering
