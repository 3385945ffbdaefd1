"""Configuration and weights of a Gemma 4 assistant, from a directory or a GGUF file.

llama.cpp's converter names the projections `nextn.*` and leaves clusters out; other converters write `mtp.*` and clusters. So tensors
outside the layers are found by the end of their names, else by their shapes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.head_files import HeadFiles, check_pairing, name_list
from paceline.drafters.head_kinds import HeadKind
from paceline.errors import CheckpointError, IncompatibleDrafterError, shortened
from paceline.models.checkpoint import is_gguf
from paceline.models.config import ModelConfig, WeightType, check_rope
from paceline.models.families.gemma4 import ASSISTANT_ARCHITECTURES, METADATA_KEYS, assistant_config, build_layers, sliding_layers
from paceline.models.families.table import FAMILIES
from paceline.models.gguf.config import ROPE_TENSORS, with_metadata_keys
from paceline.models.gguf.file import GgufFile, open_gguf, split_parts
from paceline.models.gguf.header import GgufTensor
from paceline.models.gguf.weights import ExtraTensors, GgufWeights
from paceline.models.json_fields import JsonFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import AttentionConfig, LayerConfig
from paceline.models.storage.tensor_file import ITEM_TYPES, FileTensor
from paceline.models.tensor_names import checkpoint_names, tensor_shapes
from paceline.models.weights import Weights

_FAMILIES = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
_FEATURE_SIZE = 1536
_LAYER_TYPES = {True: "sliding_attention", False: "full_attention"}


@dataclass(frozen=True, slots=True)
class Clusters:
    """The vocabulary in clusters of equal size: only tokens of the `num_best` best clusters are scored."""

    count: int
    num_best: int


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """Configuration of an assistant.

    Attributes:
        layers: its decoder; each layer attends to the keys and values of a target layer.
        feature_size: E of the target.
        clusters: None = every token is scored.
    """

    layers: ModelConfig
    feature_size: int
    clusters: Clusters | None


def fits_target(files: HeadFiles, target: ModelConfig) -> bool:
    """Return whether the files hold an assistant for models of the target's family and hidden size."""
    is_assistant = files.kind is HeadKind.GEMMA4_ASSISTANT and target.family in _FAMILIES.values()
    return is_assistant and files.config.get("backbone_hidden_size", _FEATURE_SIZE) == target.hidden_size


def read_assistant_config(files: HeadFiles, target: ModelConfig) -> AssistantConfig:
    """Return the configuration of an assistant for a target.

    Raises:
        CheckpointError: a value is missing, invalid, or not supported.
        IncompatibleDrafterError: it was made for another target.
    """
    if target.family not in _FAMILIES.values():
        raise IncompatibleDrafterError(f"{files.path} is an assistant of Gemma 4, and the target is a {target.family}: use another drafter")
    path, values, text = files.config_path, files.config, files.config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{path}: text_config = {shortened(text)}, expected the values of the assistant's layers")
    family = FAMILIES[_FAMILIES.get(str(values.get("model_type")), "gemma4_text")]
    fields = JsonFields({**family.defaults, "hidden_size_per_layer_input": 0, **text}, path)
    whole = JsonFields(values, path)
    vocab_size, feature_size = fields.integer("vocab_size"), whole.integer("backbone_hidden_size", _FEATURE_SIZE)
    check_pairing(files, target, hidden_size=feature_size, vocab_rows=vocab_size)
    layers = _read_layers(files, LayerBuilder(fields, family), target)
    config = ModelConfig(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        layers=layers,
        norm_eps=fields.epsilon("rms_norm_eps", 1e-6),
        max_positions=target.max_positions,
        weight_type=WeightType.F32,
        tied_embeddings=True,
    )
    check_rope(config, path)
    return AssistantConfig(config, feature_size, _read_clusters(whole, vocab_size))


def _read_layers(files: HeadFiles, read: LayerBuilder, target: ModelConfig) -> tuple[LayerConfig, ...]:
    fields = read.fields
    for name, none in (("hidden_size_per_layer_input", 0), ("use_double_wide_mlp", False)):
        if fields.values.get(name) not in (None, none):
            raise CheckpointError(f"{fields.path}: {name} = {shortened(fields.values[name])} is not supported for assistants")
    shared = fields.values.get("num_kv_shared_layers")
    if shared not in (None, 0, read.num_layers):
        raise CheckpointError(f"{fields.path}: num_kv_shared_layers = {shortened(shared)}, expected all {read.num_layers} layers")
    is_sliding, owners = sliding_layers(read), _last_cached_layers(target)
    for is_local in is_sliding:
        if is_local not in owners:
            raise IncompatibleDrafterError(
                f"the assistant {files.path} has {_LAYER_TYPES[is_local]} layers, the target has none that keep keys"
            )
    layers = build_layers(read, is_sliding, [owners[is_local] for is_local in is_sliding])
    made = {layer: _with_kv_of_target_layer(files, read, layer, target) for layer in dict.fromkeys(layers)}
    return tuple(made[layer] for layer in layers)


def _last_cached_layers(target: ModelConfig) -> dict[bool, int]:
    """Return the last target layer with cached keys and values of each type: sliding (True) and full attention (False)."""
    plain = [replace(layer.attention, kv_layer=None) for layer in target.layers]
    return {plain[index] != plain[-1]: index for index, layer in enumerate(target.layers) if layer.attention.kv_layer is None}


def _with_kv_of_target_layer(files: HeadFiles, read: LayerBuilder, layer: LayerConfig, target: ModelConfig) -> LayerConfig:
    """Return the layer with the number of key heads and the window of the target layer whose cache it reads.

    A drafted row follows the cached positions and adds no key of its own, so it attends to at most window - 1 of them.
    """
    mixer, owner = layer.attention, layer.attention.kv_layer or 0
    kept: AttentionConfig = target.layers[owner].attention
    if mixer.head_size != kept.head_size or read.num_heads % kept.num_kv_heads:
        raise IncompatibleDrafterError(
            f"the assistant {files.path} has {read.num_heads} query heads of {mixer.head_size} values where the target's layer {owner} has "
            f"{kept.num_kv_heads} key heads of {kept.head_size}: it was made for another model"
        )
    if mixer.window is not None and kept.window is not None and mixer.window != kept.window:
        raise IncompatibleDrafterError(
            f"the assistant {files.path} has sliding_window = {mixer.window}, the target {kept.window}: it was made for another model"
        )
    window = None if kept.window is None else max(1, kept.window - 1)
    return replace(layer, mixer=replace(mixer, num_kv_heads=kept.num_kv_heads, window=window))


def _read_clusters(fields: JsonFields, vocab_size: int) -> Clusters | None:
    if not fields.flag("use_ordered_embeddings", default=False):
        return None
    count, num_best = fields.integer("num_centroids", 2048), fields.integer("centroid_intermediate_top_k", 32)
    if vocab_size % count or num_best > count:
        raise CheckpointError(
            f"{fields.path}: num_centroids = {count} with centroid_intermediate_top_k = {num_best} of {vocab_size} tokens: expected a "
            "divisor of these, and no more than it"
        )
    return Clusters(count, num_best)


_PRE, _POST, _CENTROIDS, _ORDERING = "pre_projection", "post_projection", "centroids", "ordering"
_GGUF_TENSOR_NAMES = {
    _PRE: "nextn.pre_projection.weight",
    _POST: "nextn.post_projection.weight",
    _CENTROIDS: "masked_embd_centroids.weight",
    _ORDERING: "masked_embd_ordering",
}
_EMBEDDING, _LM_HEAD_TENSOR = "token_embd.weight", "output.weight"
_LAYER_TENSORS = (_EMBEDDING, _LM_HEAD_TENSOR, "output_norm.weight", *ROPE_TENSORS)
_DEFAULT_NUM_BEST = 32


def open_gguf_assistant(path: Path) -> HeadFiles | None:
    """Open the assistant in a GGUF file; None if the file holds something else.

    The returned tensors are those outside the layers.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = open_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ASSISTANT_ARCHITECTURES:
        return None
    text = assistant_config(file)
    features = _feature_size(file)
    names = _find_tensor_names(file, text["vocab_size"], text["hidden_size"], features)
    is_clustered = file.metadata.get(f"{architecture}.use_ordered_embeddings")
    is_clustered = (_CENTROIDS in names or _ORDERING in names) if is_clustered is None else is_clustered
    parts = tuple(_GGUF_TENSOR_NAMES) if is_clustered else (_PRE, _POST)
    if missing := [_GGUF_TENSOR_NAMES[part] for part in parts if part not in names]:
        raise CheckpointError(f"{file.path} lacks {name_list(missing)}: the assistant is incomplete; download the file again")
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
        config |= {"num_centroids": count, "centroid_intermediate_top_k": min(_DEFAULT_NUM_BEST, count) if best is None else best}
    tensors = {in_file: _open_tensor(file.tensors[in_file]) for in_file in names.values()}
    return HeadFiles(path, config, tensors, HeadKind.GEMMA4_ASSISTANT, split_parts(path))


def open_gguf_weights(files: HeadFiles, config: AssistantConfig, *, num_threads: int) -> tuple[GgufWeights, str]:
    """Return the tensors of an assistant's network, and the name in the file of its token ordering.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape or of a type that cannot be read.
    """
    file, layers, size = open_gguf(files.path), config.layers, config.feature_size
    names = _find_tensor_names(file, layers.vocab_size, layers.hidden_size, size)
    tensors = {
        "pre_projection.weight": (names[_PRE], (layers.hidden_size, 2 * size)),
        "post_projection.weight": (names[_POST], (size, layers.hidden_size)),
    }
    if config.clusters is not None:
        tensors["centroids.weight"] = names[_CENTROIDS], (config.clusters.count, layers.hidden_size)
    if _LM_HEAD_TENSOR in file.tensors:  # an lm_head of its own replaces token_embd
        tensors["embedding.weight"] = _LM_HEAD_TENSOR, (layers.vocab_size, layers.hidden_size)
    extra = ExtraTensors(tensors, {*names.values(), _EMBEDDING}, "assistant")
    return GgufWeights(file, layers, extra=extra, num_threads=num_threads), names.get(_ORDERING, "")


def _feature_size(file: GgufFile) -> int:
    """Return E of the target: from the metadata, else half the input width of the first projection."""
    architecture = file.metadata["general.architecture"]
    keys = [f"{architecture}.{key}" for key in ("embedding_length_out", "n_embd_backbone")]
    size = next((file.metadata[key] for key in keys if key in file.metadata), None)
    projection = next((tensor for name, tensor in file.tensors.items() if _names_part(name, _PRE)), None)
    if size is None and projection is not None and len(projection.shape) == 2:
        return projection.shape[1] // 2
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < 2**31:
        raise CheckpointError(f"{file.path}: {keys[0]} = {shortened(size)}, expected the target's hidden size; download the file again")
    return size


def _find_tensor_names(file: GgufFile, vocab_size: int, hidden_size: int, features: int) -> Mapping[str, str]:
    """Return the stored name of each tensor outside the layers, as far as the file has it."""
    found = {part: name for part in _GGUF_TENSOR_NAMES for name in file.tensors if _names_part(name, part)}
    shapes: dict[str, tuple[int | None, ...]] = {  # by shape; a shape that fits several parts means the first one
        _PRE: (hidden_size, 2 * features),
        _POST: (features, hidden_size),
        _ORDERING: (vocab_size,),
        _CENTROIDS: (None, hidden_size),
    }
    loose = [name for name in file.tensors if not name.startswith("blk.") and name not in (*_LAYER_TENSORS, *found.values())]
    for part, shape in shapes.items():
        fitting = [name for name in loose if _fits_shape(file.tensors[name].shape, shape)]
        if part not in found and len(fitting) == 1:
            found[part] = fitting[0]
            loose.remove(fitting[0])
    return found


def _names_part(name: str, part: str) -> bool:
    return name.removesuffix(".weight").endswith(part)


def _fits_shape(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(wanted in (None, size) for size, wanted in zip(shape, expected, strict=True))


def _open_tensor(stored: GgufTensor) -> FileTensor:
    return FileTensor(stored.shape, stored.block_type.name, partial(_read_array, stored))


def _read_array(stored: GgufTensor) -> NDArray[Any]:
    values = stored.data.view(np.dtype(ITEM_TYPES[stored.block_type.name])).reshape(stored.shape)
    return values if values.flags.aligned else values.copy()


_TOKEN_ORDERING = "masked_embedding.token_ordering"
_LM_HEAD = "lm_head.weight"
_UNUSED = re.compile(r"layers\.[0-9]{1,6}\.self_attn\.(k_proj|v_proj|k_norm)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Assistant:
    """A loaded assistant.

    Attributes:
        weights: under the names of `network.py`; `embedding.weight` is the vocabulary matrix.
        token_ordering: [V] the token ids, cluster by cluster; None = no clusters.
    """

    config: AssistantConfig
    weights: Weights
    token_ordering: NDArray[np.int64] | None


def load_assistant(files: HeadFiles, target: ModelConfig, *, num_threads: int = 1) -> Assistant:
    """Load the assistant in some files for a target.

    Args:
        num_threads: for the conversion of a GGUF file's matrices.

    Raises:
        CheckpointError: tensors are missing, of another shape, or unknown.
        IncompatibleDrafterError: it was made for another target.
    """
    if not is_gguf(files.path):
        return _open_directory(files, read_assistant_config(files, target))
    try:
        config = read_assistant_config(files, target)
    except CheckpointError as error:
        raise with_metadata_keys(error, files.config["general.architecture"], METADATA_KEYS) from None
    weights, ordering = open_gguf_weights(files, config, num_threads=num_threads)
    return Assistant(config, weights, None if config.clusters is None else _token_ordering(files, ordering, config.layers.vocab_size))


def _open_directory(files: HeadFiles, config: AssistantConfig) -> Assistant:
    layers, size = config.layers, config.feature_size
    shapes = dict(tensor_shapes(layers))
    names = {name: theirs.removeprefix("model.") for name, theirs in checkpoint_names(layers).items()}
    shapes |= {"pre_projection.weight": (layers.hidden_size, 2 * size), "post_projection.weight": (size, layers.hidden_size)}
    names |= {name: name for name in ("pre_projection.weight", "post_projection.weight")}
    needed: dict[str, tuple[int, ...]] = {}
    if config.clusters is not None:
        shapes["centroids.weight"] = (config.clusters.count, layers.hidden_size)
        names["centroids.weight"] = "masked_embedding.centroids.weight"
        needed[_TOKEN_ORDERING] = (layers.vocab_size,)
    if _LM_HEAD in files.tensors:  # tied to embed_tokens, which the file may then lack
        names["embedding.weight"] = _LM_HEAD
    files.check({names[name]: shape for name, shape in shapes.items()} | needed)
    known = {*names.values(), *needed, "embed_tokens.weight"}
    files.check_all_used(known, ignored=lambda name: _UNUSED.fullmatch(name) is not None or name.startswith("masked_embedding."))
    weights = Weights({name: files.weight(theirs) for name, theirs in names.items()})
    return Assistant(config, weights, _token_ordering(files, _TOKEN_ORDERING, layers.vocab_size) if needed else None)


def _token_ordering(files: HeadFiles, name: str, vocab_size: int) -> NDArray[np.int64]:
    ordering = files.table(name)
    if not np.array_equal(np.sort(ordering), np.arange(vocab_size)):
        raise CheckpointError(f"{files.path}: {name} does not hold each of the {vocab_size} token ids once: download the file again")
    return ordering
