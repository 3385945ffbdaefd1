"""Configuration and weights of a Gemma 4 assistant, from a directory or a GGUF file.

llama.cpp's GGUF converter names the projections `nextn.*` and drops the clusters of the vocabulary; other converters name the projections
`mtp.*` and keep the clusters. So tensors outside of layers are found by the ends of their names, or else by their shapes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.head_files import HeadFiles, check_target_sizes, gguf_tensors
from paceline.drafters.head_kinds import HeadKind
from paceline.errors import CheckpointError, IncompatibleDrafterError, name_list, shortened
from paceline.models.checkpoint import is_gguf
from paceline.models.config import ModelConfig, WeightType, check_rope
from paceline.models.families.gemma4 import ASSISTANT_ARCHITECTURES, METADATA_KEYS, assistant_fields, build_gemma4_layers, sliding_layers
from paceline.models.families.table import FAMILIES
from paceline.models.gguf.config import ROPE_TENSORS, with_metadata_keys
from paceline.models.gguf.file import GgufFile, open_gguf, split_parts
from paceline.models.gguf.stored_tensor import TensorSource
from paceline.models.gguf.weights import ExtraTensors, GgufWeights
from paceline.models.json_fields import JsonFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import AttentionConfig, LayerConfig
from paceline.models.tensor_names import checkpoint_names, tensor_shapes
from paceline.models.weights import Weights

_FAMILY_BY_MODEL_TYPE = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
_DEFAULT_TARGET_HIDDEN_SIZE = 1536
_LAYER_TYPES = {True: "sliding_attention", False: "full_attention"}


@dataclass(frozen=True, slots=True)
class VocabularyClusters:
    """Clusters of equal size that divide the vocabulary: logits are computed only for tokens of the `top_k` most probable clusters."""

    num_clusters: int
    top_k: int


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    layers: ModelConfig  # sizes of the decoder layers; each attends to the keys and values of one target layer
    target_hidden_size: int
    clusters: VocabularyClusters | None  # None = no clusters: logits of all tokens are computed


def fits_target(files: HeadFiles, target: ModelConfig) -> bool:
    """Return whether the files hold an assistant for models of the target's family and hidden size."""
    is_assistant = files.kind is HeadKind.GEMMA4_ASSISTANT and target.family in _FAMILY_BY_MODEL_TYPE.values()
    return is_assistant and files.config.get("backbone_hidden_size", _DEFAULT_TARGET_HIDDEN_SIZE) == target.hidden_size


def read_assistant_config(files: HeadFiles, target: ModelConfig) -> AssistantConfig:
    """Read the configuration of an assistant, and check that it fits the target.

    Raises:
        CheckpointError: a config value is missing, invalid or not supported.
        IncompatibleDrafterError: the assistant was made for another target.
    """
    if target.family not in _FAMILY_BY_MODEL_TYPE.values():
        raise IncompatibleDrafterError(f"{files.path} is an assistant of Gemma 4, and the target is a {target.family}: use another drafter")
    path, values, text = files.config_path, files.config, files.config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{path}: text_config = {shortened(text)}, expected the values of the assistant's layers")
    family = FAMILIES[_FAMILY_BY_MODEL_TYPE.get(str(values.get("model_type")), "gemma4_text")]
    fields = JsonFields({**family.defaults, "hidden_size_per_layer_input": 0, **text}, path)
    top_fields = JsonFields(values, path)
    vocab_size, target_hidden_size = fields.integer("vocab_size"), top_fields.integer("backbone_hidden_size", _DEFAULT_TARGET_HIDDEN_SIZE)
    check_target_sizes(files, target, hidden_size=target_hidden_size, num_vocab_rows=vocab_size)
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
    return AssistantConfig(config, target_hidden_size, _read_clusters(top_fields, vocab_size))


def _read_layers(files: HeadFiles, builder: LayerBuilder, target: ModelConfig) -> tuple[LayerConfig, ...]:
    fields = builder.fields
    for name, none in (("hidden_size_per_layer_input", 0), ("use_double_wide_mlp", False)):
        if fields.values.get(name) not in (None, none):
            raise CheckpointError(f"{fields.path}: {name} = {shortened(fields.values[name])} is not supported for assistants")
    shared = fields.values.get("num_kv_shared_layers")
    if shared not in (None, 0, builder.num_layers):
        raise CheckpointError(f"{fields.path}: num_kv_shared_layers = {shortened(shared)}, expected all {builder.num_layers} layers")
    is_sliding, kv_layers = sliding_layers(builder), _last_cached_layers(target)
    for is_local in is_sliding:
        if is_local not in kv_layers:
            raise IncompatibleDrafterError(
                f"the assistant {files.path} has {_LAYER_TYPES[is_local]} layers, the target has none that keep keys"
            )
    layers = build_gemma4_layers(builder, is_sliding, [kv_layers[is_local] for is_local in is_sliding])
    converted = {layer: _with_kv_of_target_layer(files, builder, layer, target) for layer in dict.fromkeys(layers)}
    return tuple(converted[layer] for layer in layers)


def _last_cached_layers(target: ModelConfig) -> dict[bool, int]:
    """Return for sliding (True) and full (False) attention the last target layer of this type that caches keys and values itself."""
    attentions = [replace(layer.attention, kv_source_layer=None) for layer in target.layers]
    return {
        attentions[index] != attentions[-1]: index for index, layer in enumerate(target.layers) if layer.attention.kv_source_layer is None
    }


def _with_kv_of_target_layer(files: HeadFiles, builder: LayerBuilder, layer: LayerConfig, target: ModelConfig) -> LayerConfig:
    """Return an assistant's layer with the number of key heads and the window of the target layer whose cache it reads.

    A draft row has no key of its own: of the target's window of w positions, which includes the row itself, it attends to w - 1.
    """
    mixer, kv_source_layer = layer.attention, layer.attention.kv_source_layer or 0
    shared: AttentionConfig = target.layers[kv_source_layer].attention
    if mixer.head_size != shared.head_size or builder.num_heads % shared.num_kv_heads:
        raise IncompatibleDrafterError(
            f"the assistant {files.path} has {builder.num_heads} query heads of {mixer.head_size} values where the target's layer "
            f"{kv_source_layer} has {shared.num_kv_heads} key heads of {shared.head_size}: it was made for another model"
        )
    if mixer.window is not None and shared.window is not None and mixer.window != shared.window:
        raise IncompatibleDrafterError(
            f"the assistant {files.path} has sliding_window = {mixer.window}, the target {shared.window}: it was made for another model"
        )
    window = None if shared.window is None else max(1, shared.window - 1)
    return replace(layer, mixer=replace(mixer, num_kv_heads=shared.num_kv_heads, window=window))


def _read_clusters(fields: JsonFields, vocab_size: int) -> VocabularyClusters | None:
    if not fields.flag("use_ordered_embeddings", default=False):
        return None
    count, top_k = fields.integer("num_centroids", 2048), fields.integer("centroid_intermediate_top_k", 32)
    if vocab_size % count or top_k > count:
        raise CheckpointError(
            f"{fields.path}: num_centroids = {count} with centroid_intermediate_top_k = {top_k} of {vocab_size} tokens: "
            "expected a divisor of the number of tokens, and a top k of at most num_centroids"
        )
    return VocabularyClusters(count, top_k)


_PRE_PROJECTION, _POST_PROJECTION, _CENTROIDS, _ORDERING = "pre_projection", "post_projection", "centroids", "ordering"
_GGUF_TENSOR_NAMES = {
    _PRE_PROJECTION: "nextn.pre_projection.weight",
    _POST_PROJECTION: "nextn.post_projection.weight",
    _CENTROIDS: "masked_embd_centroids.weight",
    _ORDERING: "masked_embd_ordering",
}
_EMBEDDING, _LM_HEAD_TENSOR = "token_embd.weight", "output.weight"
_KNOWN_TENSORS = (_EMBEDDING, _LM_HEAD_TENSOR, "output_norm.weight", *ROPE_TENSORS)
_DEFAULT_NUM_TOP_CLUSTERS = 32


def open_gguf_assistant(path: Path) -> HeadFiles | None:
    """Open the assistant in a GGUF file; None if the file contains something else.

    The result's tensors are only those that belong to no layer. `open_gguf_weights` opens all.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = open_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ASSISTANT_ARCHITECTURES:
        return None
    text = assistant_fields(file)
    target_hidden_size = _read_target_hidden_size(file)
    names = _find_tensor_names(file, text["vocab_size"], text["hidden_size"], target_hidden_size)
    is_clustered = file.metadata.get(f"{architecture}.use_ordered_embeddings")
    is_clustered = (_CENTROIDS in names or _ORDERING in names) if is_clustered is None else is_clustered
    modules = tuple(_GGUF_TENSOR_NAMES) if is_clustered else (_PRE_PROJECTION, _POST_PROJECTION)
    if missing := [_GGUF_TENSOR_NAMES[module] for module in modules if module not in names]:
        raise CheckpointError(f"{file.path} lacks {name_list(missing)}: the assistant is incomplete; download the file again")
    config = {
        "general.architecture": architecture,
        "model_type": HeadKind.GEMMA4_ASSISTANT.value,
        "backbone_hidden_size": target_hidden_size,
        "use_ordered_embeddings": is_clustered,
        "text_config": text,
    }
    if is_clustered:
        count = next(iter(file.tensors[names[_CENTROIDS]].shape), 0)
        top_k = file.metadata.get(f"{architecture}.centroid_top_k")
        config |= {"num_centroids": count, "centroid_intermediate_top_k": min(_DEFAULT_NUM_TOP_CLUSTERS, count) if top_k is None else top_k}
    tensors, _ = gguf_tensors({name: TensorSource(file.tensors[name], file.tensors[name].shape) for name in names.values()})
    return HeadFiles(path, config, tensors, HeadKind.GEMMA4_ASSISTANT, split_parts(path))


def open_gguf_weights(files: HeadFiles, config: AssistantConfig, *, num_threads: int) -> tuple[GgufWeights, str]:
    """Return the weights of an assistant, and the name that its token ordering has in the file; "" if it has no clusters.

    Raises:
        CheckpointError: a tensor is missing, unknown, of the wrong shape, or of a type that cannot be read.
    """
    file, layers, size = open_gguf(files.path), config.layers, config.target_hidden_size
    names = _find_tensor_names(file, layers.vocab_size, layers.hidden_size, size)
    tensors = {
        "pre_projection.weight": (names[_PRE_PROJECTION], (layers.hidden_size, 2 * size)),
        "post_projection.weight": (names[_POST_PROJECTION], (size, layers.hidden_size)),
    }
    if config.clusters is not None:
        tensors["centroids.weight"] = names[_CENTROIDS], (config.clusters.num_clusters, layers.hidden_size)
    if _LM_HEAD_TENSOR in file.tensors:  # this assistant's lm_head is not its token embedding
        tensors["embedding.weight"] = _LM_HEAD_TENSOR, (layers.vocab_size, layers.hidden_size)
    extra = ExtraTensors(tensors, {*names.values(), _EMBEDDING}, "assistant")
    return GgufWeights(file, layers, extra_tensors=extra, num_threads=num_threads), names.get(_ORDERING, "")


def _read_target_hidden_size(file: GgufFile) -> int:
    """Return the target's hidden size: from the metadata, or else half the input size of the first projection."""
    architecture = file.metadata["general.architecture"]
    keys = [f"{architecture}.{key}" for key in ("embedding_length_out", "n_embd_backbone")]
    size = next((file.metadata[key] for key in keys if key in file.metadata), None)
    projection = next((tensor for name, tensor in file.tensors.items() if _is_tensor_of_module(name, _PRE_PROJECTION)), None)
    if size is None and projection is not None and len(projection.shape) == 2:
        return projection.shape[1] // 2
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < 2**31:
        raise CheckpointError(f"{file.path}: {keys[0]} = {shortened(size)}, expected the target's hidden size; download the file again")
    return size


def _find_tensor_names(file: GgufFile, vocab_size: int, hidden_size: int, target_hidden_size: int) -> Mapping[str, str]:
    """Map internal names of the tensors outside of layers to their names in the file. Tensors that the file lacks are left out."""
    names = {module: name for module in _GGUF_TENSOR_NAMES for name in file.tensors if _is_tensor_of_module(name, module)}
    shapes: dict[str, tuple[int | None, ...]] = {  # a tensor whose shape fits several modules is assigned to the first of them
        _PRE_PROJECTION: (hidden_size, 2 * target_hidden_size),
        _POST_PROJECTION: (target_hidden_size, hidden_size),
        _ORDERING: (vocab_size,),
        _CENTROIDS: (None, hidden_size),
    }
    unassigned = [name for name in file.tensors if not name.startswith("blk.") and name not in (*_KNOWN_TENSORS, *names.values())]
    for module, shape in shapes.items():
        sizes = {name: file.tensors[name].shape for name in unassigned if len(file.tensors[name].shape) == len(shape)}
        matching = [name for name in sizes if all(expected in (None, size) for size, expected in zip(sizes[name], shape, strict=True))]
        if module not in names and len(matching) == 1:
            names[module] = matching[0]
            unassigned.remove(matching[0])
    return names


def _is_tensor_of_module(name: str, module: str) -> bool:
    return name.removesuffix(".weight").endswith(module)


_TOKEN_ORDERING = "masked_embedding.token_ordering"
_LM_HEAD = "lm_head.weight"
_UNUSED_TENSOR_PATTERN = re.compile(r"layers\.[0-9]{1,6}\.self_attn\.(k_proj|v_proj|k_norm)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Assistant:
    """Config and weights of an assistant."""

    config: AssistantConfig
    weights: Weights  # weights by the names of `network.py`; `embedding.weight` is the lm_head
    token_ordering: NDArray[np.int64] | None  # [V] all token ids, grouped by cluster; None = there are no clusters


def load_assistant(files: HeadFiles, target: ModelConfig, *, num_threads: int = 1) -> Assistant:
    """Load an assistant from its files, and check that it fits the target.

    Args:
        num_threads: threads that convert the quantised matrices of a GGUF file.

    Raises:
        CheckpointError: tensors are missing, unknown, or of the wrong shape.
        IncompatibleDrafterError: the assistant was made for another target.
    """
    if not is_gguf(files.path):
        return _load_from_directory(files, read_assistant_config(files, target))
    try:
        config = read_assistant_config(files, target)
    except CheckpointError as error:
        raise with_metadata_keys(error, files.config["general.architecture"], METADATA_KEYS) from None
    weights, ordering = open_gguf_weights(files, config, num_threads=num_threads)
    return Assistant(config, weights, None if config.clusters is None else _read_token_ordering(files, ordering, config.layers.vocab_size))


def _load_from_directory(files: HeadFiles, config: AssistantConfig) -> Assistant:
    layers, size = config.layers, config.target_hidden_size
    shapes = dict(tensor_shapes(layers))
    names = {name: file_name.removeprefix("model.") for name, file_name in checkpoint_names(layers).items()}
    shapes |= {"pre_projection.weight": (layers.hidden_size, 2 * size), "post_projection.weight": (size, layers.hidden_size)}
    names |= {name: name for name in ("pre_projection.weight", "post_projection.weight")}
    ordering_shape: dict[str, tuple[int, ...]] = {}
    if config.clusters is not None:
        shapes["centroids.weight"] = (config.clusters.num_clusters, layers.hidden_size)
        names["centroids.weight"] = "masked_embedding.centroids.weight"
        ordering_shape[_TOKEN_ORDERING] = (layers.vocab_size,)
    if _LM_HEAD in files.tensors:  # the lm_head is equal to embed_tokens, which the file may lack
        names["embedding.weight"] = _LM_HEAD
    files.check_shapes({names[name]: shape for name, shape in shapes.items()} | ordering_shape)
    used = {*names.values(), *ordering_shape, "embed_tokens.weight"}
    files.check_all_used(used, ignored=lambda name: bool(_UNUSED_TENSOR_PATTERN.fullmatch(name)) or name.startswith("masked_embedding."))
    weights = Weights({name: files.weight(file_name) for name, file_name in names.items()})
    return Assistant(config, weights, _read_token_ordering(files, _TOKEN_ORDERING, layers.vocab_size) if ordering_shape else None)


def _read_token_ordering(files: HeadFiles, name: str, vocab_size: int) -> NDArray[np.int64]:
    ordering = files.integer_vector(name)
    if not np.array_equal(np.sort(ordering), np.arange(vocab_size)):
        raise CheckpointError(f"{files.path}: {name} does not hold each of the {vocab_size} token ids once: download the file again")
    return ordering
