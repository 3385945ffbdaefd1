"""What a Gemma 4 assistant is: the sizes in its config.json, made to read the keys and values of one target."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.drafters.head_files import HeadFiles, check_pairing
from paceline.drafters.head_kinds import HeadKind
from paceline.errors import CheckpointError, IncompatibleDrafterError, shortened
from paceline.models.checkpoint import is_gguf
from paceline.models.config import ModelConfig, WeightType, check_frequencies
from paceline.models.families.gemma4 import build_layers, sliding_layers
from paceline.models.families.table import FAMILIES
from paceline.models.json_fields import JsonFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import AttentionConfig, LayerConfig

_FAMILIES = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
_FEATURE_SIZE = 1536
_KINDS = {True: "sliding_attention", False: "full_attention"}


@dataclass(frozen=True, slots=True)
class Clusters:
    """The vocabulary in clusters of equal size: only the tokens of the best `num_best` of them are looked at."""

    count: int
    num_best: int


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """One assistant.

    Attributes:
        layers: its decoder; the attention of each layer reads a layer of the target.
        feature_size: E of the target.
        clusters: None = every token is looked at.
    """

    layers: ModelConfig
    feature_size: int
    clusters: Clusters | None


def suits(files: HeadFiles, target: ModelConfig) -> bool:
    """Whether some head's files say that they hold an assistant for models of the target's family and width."""
    is_assistant = files.kind is HeadKind.GEMMA4_ASSISTANT and target.family in _FAMILIES.values()
    return is_assistant and files.config.get("backbone_hidden_size", _FEATURE_SIZE) == target.hidden_size


def read_assistant(files: HeadFiles, target: ModelConfig) -> AssistantConfig:
    """The assistant in some files, for a target.

    Raises:
        CheckpointError: a value is missing or absurd, or stands for something that is not computed.
        IncompatibleDrafterError: it was made for another target.
    """
    if target.family not in _FAMILIES.values():
        raise IncompatibleDrafterError(f"{files.path} is an assistant of Gemma 4, and the target is a {target.family}: use another drafter")
    path, values, text = _config_path(files), files.config, files.config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{path}: text_config = {shortened(text)}, expected the values of the assistant's layers")
    family = FAMILIES[_FAMILIES.get(str(values.get("model_type")), "gemma4_text")]
    fields = JsonFields({**family.defaults, "hidden_size_per_layer_input": 0, **text}, path)
    whole = JsonFields(values, path)
    vocab_size, feature_size = fields.size("vocab_size"), whole.size("backbone_hidden_size", _FEATURE_SIZE)
    check_pairing(files, target, hidden_size=feature_size, vocab_rows=vocab_size)
    layers = _layers(files, LayerBuilder(fields, family), target)
    config = ModelConfig(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=fields.size("hidden_size"),
        layers=layers,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=target.max_positions,
        weight_type=WeightType.F32,
        tied_embeddings=True,
    )
    check_frequencies(config, path)
    return AssistantConfig(config, feature_size, _clusters(whole, vocab_size))


def _config_path(files: HeadFiles) -> Path:
    if is_gguf(files.path):
        return files.path
    return (files.path if files.path.is_dir() else files.path.parent) / "config.json"


def _layers(files: HeadFiles, read: LayerBuilder, target: ModelConfig) -> tuple[LayerConfig, ...]:
    fields = read.fields
    for name, none in (("hidden_size_per_layer_input", 0), ("use_double_wide_mlp", False)):
        if fields.values.get(name) not in (None, none):
            raise CheckpointError(f"{fields.path}: {name} = {shortened(fields.values[name])}: assistants have none of it")
    shared = fields.values.get("num_kv_shared_layers")
    if shared not in (None, 0, read.num_layers):
        raise CheckpointError(f"{fields.path}: num_kv_shared_layers = {shortened(shared)}, expected all {read.num_layers} layers")
    slides, owners = sliding_layers(read), _owners(target)
    for is_local in slides:
        if is_local not in owners:
            raise IncompatibleDrafterError(f"the assistant {files.path} has {_KINDS[is_local]} layers, the target has none that keep keys")
    layers = build_layers(read, slides, [owners[is_local] for is_local in slides])
    made = {layer: _reading(files, read, layer, target) for layer in dict.fromkeys(layers)}
    return tuple(made[layer] for layer in layers)


def _owners(target: ModelConfig) -> dict[bool, int]:
    """The last layer of each kind that keeps keys and values, by whether it sees a window. The last of all sees the whole text."""
    plain = [replace(layer.attention, kv_layer=None) for layer in target.layers]
    return {plain[index] != plain[-1]: index for index, layer in enumerate(target.layers) if layer.attention.kv_layer is None}


def _reading(files: HeadFiles, read: LayerBuilder, layer: LayerConfig, target: ModelConfig) -> LayerConfig:
    """A layer with the key heads and the window of the target's layer it reads.

    A row stands at the position behind the cached ones and has no key of its own there: it sees one cached row less than the window.
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


def _clusters(fields: JsonFields, vocab_size: int) -> Clusters | None:
    if not fields.flag("use_ordered_embeddings", default=False):
        return None
    count, num_best = fields.size("num_centroids", 2048), fields.size("centroid_intermediate_top_k", 32)
    if vocab_size % count or num_best > count:
        raise CheckpointError(
            f"{fields.path}: num_centroids = {count} with centroid_intermediate_top_k = {num_best} of {vocab_size} tokens: expected a "
            "divisor of these, and no more than it"
        )
    return Clusters(count, num_best)
