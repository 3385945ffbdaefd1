"""`ModelConfig`: the network of a checkpoint, read from its config.json or GGUF metadata."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import CheckpointError, shortened
from paceline.model_directory import SAFETENSORS, no_model_error
from paceline.models.families.family import Family
from paceline.models.families.table import find_family
from paceline.models.json_fields import JsonFields, RecordedFields
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.layer_builder import MAX_HEAD_SIZE, LayerBuilder
from paceline.models.layers import AltUp, AttentionConfig, LayerConfig, Recurrent
from paceline.models.multimodal import has_conflicting_tied_embeddings, text_model_fields
from paceline.models.quantized_formats.table import find_quantized_format
from paceline.models.rope import inverse_frequencies, query_scales
from paceline.models.rope_config import RopeConfig
from paceline.models.storage.safetensors_file import has_tensor, most_common_dtype
from paceline.small_files import is_file, read_json


class WeightType(Enum):
    """Float type of weights and of computations with them."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"

    @property
    def numpy_dtype(self) -> "np.dtype[Any]":
        """Return the numpy type of arrays of this type. numpy has no bf16, so its bits are held as uint16."""
        return np.dtype({WeightType.F32: "<f4", WeightType.F16: "<f2", WeightType.BF16: "<u2"}[self])


FLOAT_TYPES = {"F32": WeightType.F32, "F16": WeightType.F16, "BF16": WeightType.BF16}
"""Float types by their names in safetensors and GGUF files."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Attention layers whose KV caches have the same shape and window: K heads of D values each.

    Attributes:
        window: number of last positions whose keys and values are kept; None = all positions.
        arrays_per_layer: 2 = keys and values, 1 = keys only: with MLA the first numbers of a key are also its value.
        layers: indices of the layers that write these keys and values, ascending. Other layers may share them.
    """

    window: int | None
    num_kv_heads: int
    head_size: int
    arrays_per_layer: int
    layers: tuple[int, ...]

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, int, int, int, int]:
        """Return [arrays_per_layer * layers, num_blocks, K, block_size, D]: for each layer the keys, then the values if separate."""
        return self.arrays_per_layer * len(self.layers), num_blocks, self.num_kv_heads, block_size, self.head_size

    def stored_shape(self, num_blocks: int, block_size: int, kv_cache_dtype: KVCacheDtype) -> tuple[int, int, int, int]:
        """Return `shape` with [block_size, D] replaced by the number of bytes of a block of one head."""
        return *self.shape(num_blocks, block_size)[:3], block_size * kv_cache_dtype.row_bytes(self.head_size)

    def bytes_per_token(self, kv_cache_dtype: KVCacheDtype) -> int:
        """Return the bytes that one position takes in the KV caches of these layers."""
        return math.prod(self.stored_shape(1, 1, kv_cache_dtype))


SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters that generation_config.json recommends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Configuration of a decoder network, independent of the file format.

    Attributes:
        max_positions: number of tokens of the longest supported text.
        has_norm_offset: checkpoints store norm weights minus 1, and `CheckpointWeights` adds 1.
        has_embedding_norm: embedding rows are normalised, without a weight.
        has_lm_head_bias: the lm_head has a bias.
        embedding_scale, logit_scale: factors of embedding rows and of logits.
        per_layer_vocab_size: number of rows of Gemma's per-layer embedding table; 0 = the model has none. Token ids
            beyond the last row use row 0.
        suppressed_token_ids: tokens that are never sampled.
        sampling_defaults: recommended sampling parameters, as pairs of name and value.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    max_positions: int
    weight_type: WeightType
    tied_embeddings: bool = False
    has_norm_offset: bool = False
    has_embedding_norm: bool = False
    has_lm_head_bias: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    per_layer_vocab_size: int = 0
    suppressed_token_ids: tuple[int, ...] = ()
    sampling_defaults: tuple[tuple[str, float], ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def sliding_window(self) -> int | None:
        """Return the shortest sliding window of all layers; None = every layer has full attention."""
        return min((mixer.window for mixer in self.attention_layers.values() if mixer.window is not None), default=None)

    @property
    def attention_layers(self) -> dict[int, AttentionConfig]:
        return {index: layer.mixer for index, layer in enumerate(self.layers) if isinstance(layer.mixer, AttentionConfig)}

    @property
    def recurrent_layers(self) -> dict[int, Recurrent]:
        """Return the settings of recurrent mixers, by layer index."""
        return {index: mixer for index, layer in enumerate(self.layers) for mixer in layer.mixers if isinstance(mixer, Recurrent)}

    @property
    def per_layer_input_size(self) -> int:
        """Return how many values each layer takes as its per-layer input for a token; 0 = there is none."""
        first = self.layers[0].per_layer_input
        return 0 if first is None else first.size

    @property
    def altup(self) -> AltUp | None:
        """Return the settings of alternating updates; None = the network has one residual stream."""
        return self.layers[0].altup

    def kv_groups(self, *, by_window: bool = True) -> tuple[KVGroup, ...]:
        """Return the layers that write keys and values, grouped by shape and sliding window, in layer order.

        Args:
            by_window: False = sliding windows are ignored, because every layer keeps all positions.
        """
        layers_by_shape: dict[tuple[int | None, int, int, int], list[int]] = {}
        for index, mixer in self.attention_layers.items():
            if mixer.kv_source_layer is None:
                sizes = (mixer.window if by_window else None, mixer.num_kv_heads, mixer.head_size, 2 if mixer.latent is None else 1)
                layers_by_shape.setdefault(sizes, []).append(index)
        return tuple(KVGroup(*sizes, tuple(layers)) for sizes, layers in layers_by_shape.items())

    @property
    def sliding_kv_groups(self) -> tuple[KVGroup, ...]:
        return tuple(group for group in self.kv_groups() if group.window is not None)

    def block_table_index(self, layer: int) -> int:
        """Return the index of the block table of a layer: 0 = full attention, i + 1 = the group `sliding_kv_groups[i]`."""
        return next((number for number, group in enumerate(self.sliding_kv_groups, 1) if layer in group.layers), 0)

    def kv_source(self, layer: int) -> int:
        """Return the layer whose keys and values `layer` reads: itself, or an earlier layer that shares them."""
        mixer = self.layers[layer].mixer
        shared = mixer.kv_source_layer if isinstance(mixer, AttentionConfig) else None
        return layer if shared is None else shared

    @property
    def rope_variants(self) -> tuple[tuple[RopeConfig, int], ...]:
        """Return the distinct pairs (rotary settings, head size) of all attention layers, in layer order."""
        rotating = [mixer for mixer in self.attention_layers.values() if mixer.has_rope_embedding]
        return tuple(dict.fromkeys((rope, mixer.rotary_head_size) for mixer in rotating for rope in (mixer.rope, mixer.key_rope)))

    @property
    def has_length_dependent_rope(self) -> bool:
        """Return whether rotary frequencies would differ if `for_context` were called with a longer context."""
        return any(rope.is_limited_to_original_len for rope, _ in self.rope_variants)

    @property
    def attention(self) -> AttentionConfig:
        """Return the settings of the first attention layer."""
        return next(iter(self.attention_layers.values()))

    def kv_bytes_per_token(self, kv_cache_dtype: KVCacheDtype) -> int:
        """Return the bytes that one position takes in the KV caches of all layers."""
        return sum(group.bytes_per_token(kv_cache_dtype) for group in self.kv_groups())

    def map_attention(self, change: Callable[[AttentionConfig], AttentionConfig]) -> "ModelConfig":
        """Return the config with `change` applied to each layer's attention settings. Equal layers still share one object."""
        changed = {
            layer: replace(layer, mixer=change(layer.mixer)) if isinstance(layer.mixer, AttentionConfig) else layer
            for layer in dict.fromkeys(self.layers)
        }
        return replace(self, layers=tuple(changed[layer] for layer in self.layers))

    def for_context(self, max_model_len: int | None) -> "ModelConfig":
        """Return the config for texts of up to `max_model_len` positions; None = the original context length.

        Some rope types have frequencies that depend on the context length. If `max_model_len` is at most the original context length,
        the original frequencies are used and `max_positions` becomes the original length. Otherwise frequencies fit `max_model_len`.
        """
        if not any(rope.type.depends_on_length for rope, _ in self.rope_variants):
            return self
        chosen = self.map_attention(lambda attention: replace(attention, rope=attention.rope.for_context(max_model_len)))
        limits = [rope.scaled_context_len for rope, _ in chosen.rope_variants if rope.is_limited_to_original_len]
        return replace(chosen, max_positions=min([self.max_positions, *limits]))


_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "per_layer_config": ({}, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "llama_4_scaling": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "lm_head_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
}
"""Fields that change the computation, and their values without effect. A family that does not read a field accepts only these values."""


_WEIGHT_TYPES = {"float32": WeightType.F32, "float16": WeightType.F16, "bfloat16": WeightType.BF16, **FLOAT_TYPES}


def read_config(directory: Path) -> ModelConfig:
    """Read the config.json and generation_config.json of a Hugging Face checkpoint directory.

    Raises:
        CheckpointError: A file is missing or malformed, a value is missing or out of range, or the model is not supported.
    """
    path = directory / "config.json"
    contents = read_json(path)
    if contents is None:
        if not any(is_file(directory / name) for name in SAFETENSORS):
            raise no_model_error(directory)
        raise CheckpointError(f"{path} is missing: a model directory needs config.json, tokenizer files and *.safetensors")
    values = text_model_fields(contents)
    if has_conflicting_tied_embeddings(contents):
        values = {**values, "tie_word_embeddings": not has_tensor(directory, "lm_head.weight")}
    find_quantized_format(values, path, find_family(values, path))  # raises an error if the quantisation method is not supported
    weight_type = None if _dtype_name(values) else _parse_weight_type(most_common_dtype(directory, tuple(FLOAT_TYPES)), path)
    generation = read_json(directory / "generation_config.json")
    return config_from_values(values, path, generation=generation, weight_type=weight_type, allows_quantized_weights=True)


def config_from_values(
    values: Mapping[str, Any],
    path: Path,
    *,
    generation: Mapping[str, Any] | None = None,
    weight_type: WeightType | None = None,
    allows_quantized_weights: bool = False,
) -> ModelConfig:
    """Return the model configuration for the fields of a config.json.

    Args:
        values: the fields of config.json, or the same fields derived from another format.
        path: the file named in errors.
        generation: the contents of generation_config.json.
        weight_type: float type of the weights; None = the dtype in `values`.
        allows_quantized_weights: accept weights in a supported quantised format. False = refuse all quantised weights.

    Raises:
        CheckpointError: A value is missing or out of range, or the model is not supported.
    """
    values = text_model_fields(values)
    family = find_family(values, path)
    given = {name: alias for alias, name in family.field_aliases.items() if values.get(alias) is not None}
    recorded = RecordedFields({**family.defaults, **values, **{name: values[alias] for name, alias in given.items()}})
    fields = JsonFields(recorded, path)
    try:
        if not allows_quantized_weights:
            _refuse_quantized_head(fields, family)
        config = _build_config(fields, family, generation, weight_type)
    except CheckpointError as error:  # Replace a field's common name in the error by the alias that the file uses.
        named = re.sub(rf"\b({'|'.join(given)})\b", lambda found: given[found[0]], str(error)) if given else str(error)
        raise CheckpointError(named) from None
    _refuse_unread_settings(recorded, recorded.names_read | set(given.values()), family, path)
    return config


def _build_config(fields: JsonFields, family: Family, generation: Mapping[str, Any] | None, weight_type: WeightType | None) -> ModelConfig:
    path = fields.path
    _refuse_unsupported_settings(fields, family)
    builder = LayerBuilder(fields, family)
    layers = family.build_layers(builder)
    generation = generation or {}
    generation_fields = JsonFields(generation, path.with_name("generation_config.json"))
    embedding_scale, logit_scale = _read_embedding_and_logit_scales(fields, family)
    end_ids = (*generation_fields.token_ids("eos_token_id"), *fields.token_ids("eos_token_id"))  # either file may lack some of the ids
    config = ModelConfig(
        family=family.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=layers,
        norm_eps=fields.epsilon("rms_norm_eps", 1e-6),
        max_positions=builder.max_positions,
        weight_type=weight_type or _parse_weight_type(_dtype_name(fields.values), path),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        has_norm_offset=family.has_norm_offset,
        has_embedding_norm=family.has_embedding_norm,
        has_lm_head_bias=family.has_lm_head_bias,
        embedding_scale=embedding_scale,
        logit_scale=logit_scale,
        logit_soft_cap=builder.soft_cap("final_logit_softcapping") if family.has_logit_soft_cap else None,
        bos_token_id=_read_bos_token_id(generation, fields.values),
        eos_token_ids=tuple(dict.fromkeys(end_ids)),
        per_layer_vocab_size=_read_per_layer_vocab_size(fields, family) if layers[0].per_layer_input is not None else 0,
        suppressed_token_ids=generation_fields.token_ids("suppress_tokens"),
        sampling_defaults=_read_recommended_sampling(generation),
    )
    check_rope(config, path)
    return config


def _read_recommended_sampling(generation: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Return the sampling parameters in a generation_config.json. `do_sample` = false becomes temperature 0."""
    values = {**generation, "temperature": 0.0} if generation.get("do_sample") is False else generation
    found = ((name, values.get(name)) for name in SAMPLING_FIELDS)
    return tuple((name, value) for name, value in found if isinstance(value, int | float) and not isinstance(value, bool))


def _read_per_layer_vocab_size(fields: JsonFields, family: Family) -> int:
    size, vocab_size = fields.integer("vocab_size_per_layer_input"), fields.integer("vocab_size")
    if size < vocab_size and not family.has_partial_per_layer_embedding:
        raise CheckpointError(
            f"{fields.path}: vocab_size_per_layer_input = {size} is below vocab_size = {vocab_size}: some tokens have no input"
        )
    return size


def _read_embedding_and_logit_scales(fields: JsonFields, family: Family) -> tuple[float, float]:
    if family.has_embedding_and_logit_multipliers:
        embedding, lm_head, logits = (
            fields.positive_number(name, 1.0) for name in ("embedding_multiplier", "lm_head_multiplier", "logits_scaling")
        )
        return embedding, lm_head / logits
    return float(fields.integer("hidden_size") ** 0.5) if family.has_scaled_embedding else 1.0, 1.0


def check_rope(config: ModelConfig, path: Path) -> None:
    """Refuse head sizes above the limit, and rotary parameters that give infinite or NaN frequencies.

    Raises:
        CheckpointError: A head size or rotary parameter in `path` is refused.
    """
    largest = max((mixer.head_size for mixer in config.attention_layers.values()), default=0)
    if largest > MAX_HEAD_SIZE:
        raise CheckpointError(f"{path}: head_dim = {largest}, expected at most {MAX_HEAD_SIZE}")
    for rope, head_size in config.rope_variants:
        for context in (None, config.max_positions):
            try:
                with np.errstate(all="ignore"):
                    frequencies, factor = inverse_frequencies(rope.for_context(context), head_size)
                    last = query_scales(rope, np.array([config.max_positions]))
                    angles = frequencies * np.float32(2**31)  # upper bound of the angle at the last supported position
                    is_usable = all(bool(np.isfinite(part).all()) for part in (angles, np.float32(factor), last))
            except (ArithmeticError, ValueError):
                is_usable = False
            if not is_usable:
                raise CheckpointError(f"{path}: the rope parameters of type {rope.type.value!r} give frequencies that are not finite")


def _refuse_unsupported_settings(fields: JsonFields, family: Family) -> None:
    """Refuse settings that change the computation in a way that is not implemented for the family."""
    if fields.values.get("is_causal") is False:
        raise CheckpointError(f"{fields.path}: is_causal is false: embedding models are not supported")
    for name, only in family.required_field_values.items():
        given = fields.values.get(name)
        if given not in (None, only):
            raise CheckpointError(f"{fields.path}: {name} = {_as_json(given)} is not supported for {family.name}, only {_as_json(only)} is")


def _refuse_unread_settings(fields: Mapping[str, Any], names_read: set[str], family: Family, path: Path) -> None:
    """Refuse settings that would change the computation but that the family does not read."""
    for name, neutral in _NEUTRAL_VALUES.items():
        if name not in names_read and fields.get(name) not in neutral:
            raise CheckpointError(
                f"{path}: {name} = {_as_json(fields.get(name))} is not supported for {family.name}, only {_as_json(neutral[-1])} is"
            )


def _as_json(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else shortened(value)


def _refuse_quantized_head(fields: JsonFields, family: Family) -> None:
    """Refuse a drafting head with quantised weights. Only target models may have them (`quantized_formats/table.py`)."""
    quantized_format = find_quantized_format(fields.values, fields.path, family, reads_settings_files=False)
    if quantized_format is not None:
        raise CheckpointError(f"{fields.path}: quantised drafting heads ({quantized_format.name}) are not supported: use another head")


def _dtype_name(values: Mapping[str, Any]) -> str | None:
    name = values.get("dtype") or values.get("torch_dtype")
    return None if name is None or name == "auto" else str(name)


def _parse_weight_type(name: str | None, path: Path) -> WeightType:
    weight_type = _WEIGHT_TYPES.get(str(name).removeprefix("torch."))
    if weight_type is None:
        raise CheckpointError(f"{path}: weights of type {shortened(name)} are not supported, only float32, float16 and bfloat16 are")
    return weight_type


def _read_bos_token_id(generation: Mapping[str, Any], values: Mapping[str, Any]) -> int | None:
    for source in (generation, values):
        token_id = source.get("bos_token_id")
        if isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < 2**31:
            return token_id
    return None
