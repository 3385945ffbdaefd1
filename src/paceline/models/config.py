"""What a network is, read from a checkpoint's own metadata."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError
from paceline.models.families import Family, JsonFields, family_of
from paceline.models.safetensors_file import most_common_dtype


class WeightType(Enum):
    """Storage type of weights, cache and computation."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"


class RopeType(Enum):
    """How rotary frequencies are scaled beyond the trained context."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its base and how it is scaled (see `models/rope.py` for the rules)."""

    theta: float = 10000.0
    type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder, independent of where they were read from.

    `head_size` is D, `num_heads` H, `num_kv_heads` K, `hidden_size` E, `vocab_size` V, `num_layers` L.
    `sliding_window` is set only where it cuts `max_positions` below what the checkpoint promises.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    weight_type: WeightType
    tied_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v
    output_bias: bool = False  # on o
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each q and k head before rope
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


_WEIGHT_TYPES = {
    "float32": WeightType.F32,
    "float16": WeightType.F16,
    "bfloat16": WeightType.BF16,
    "F32": WeightType.F32,
    "F16": WeightType.F16,
    "BF16": WeightType.BF16,
}


def read_config(directory: Path) -> ModelConfig:
    """The network a Hugging Face checkpoint directory holds, from its config.json and generation_config.json.

    A sliding window is honoured by ending the context where the window would begin to slide.

    Raises:
        CheckpointError: a file is missing or no JSON, a value is missing or absurd, or the network is not one we run.
    """
    path = directory / "config.json"
    values = _read_json(path)
    family = family_of(values, path)
    fields = JsonFields(values, path)
    _refuse_what_we_do_not_compute(fields)
    num_heads = fields.size("num_attention_heads")
    hidden_size = fields.size("hidden_size")
    num_kv_heads = fields.size("num_key_value_heads", family.default_kv_heads or num_heads, null=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{path}: num_attention_heads = {num_heads} must be a multiple of num_key_value_heads = {num_kv_heads}")
    if values.get("head_dim") is None and family.default_head_size is None and hidden_size % num_heads:
        raise CheckpointError(f"{path}: no head_dim, and hidden_size = {hidden_size} is no multiple of num_attention_heads = {num_heads}")
    head_size = fields.size("head_dim", family.default_head_size or hidden_size // num_heads, null=hidden_size // num_heads)
    if head_size % 2:
        raise CheckpointError(f"{path}: head_dim = {head_size}; rotary embeddings need an even one")
    max_positions = fields.size("max_position_embeddings", family.default_max_positions)
    window = family.sliding_window(fields)
    limits_context = window is not None and window < max_positions
    generation = directory / "generation_config.json"
    generation_values = _read_json(generation) if generation.is_file() else {}
    return ModelConfig(
        family=family.name,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=window if window is not None and limits_context else max_positions,
        rope=_read_rope(fields, max_positions),
        weight_type=_read_weight_type(fields, directory),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        **family.switches(fields),
        sliding_window=window if limits_context else None,
        bos_token_id=_bos_token_id(generation_values, values, family),
        eos_token_ids=_eos_token_ids(JsonFields(generation_values, generation), fields, family),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: a model directory needs config.json, tokenizer files and *.safetensors") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}; download the file again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}, expected an object; download the file again")
    return values


def _refuse_what_we_do_not_compute(fields: JsonFields) -> None:
    activation = fields.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{fields.path}: hidden_act = {activation!r} is not supported, only 'silu' is")
    quantization = fields.values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise CheckpointError(
            f"{fields.path}: the weights are quantised ({method!r}); supported are f32, f16 and bf16: use the model it was made from"
        )
    _refuse_partial_rotation(fields)


def _refuse_partial_rotation(fields: JsonFields) -> None:
    factor = fields.number("partial_rotary_factor", 1.0)
    if factor != 1.0:
        raise CheckpointError(f"{fields.path}: partial_rotary_factor = {factor} is not supported, only 1.0 is")


def _read_rope(fields: JsonFields, max_positions: int) -> RopeConfig:
    """Both spellings: `rope_parameters`, or the older `rope_theta` with `rope_scaling`."""
    scaling = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
        raise CheckpointError(f"{fields.path}: rope parameters {scaling!r} are not supported, expected one set for all layers")
    rope = JsonFields(scaling, fields.path)
    name = scaling.get("rope_type", scaling.get("type", "default"))
    supported = [rope_type.value for rope_type in RopeType]
    if name not in supported:
        raise CheckpointError(f"{fields.path}: rope type {name!r} is not supported, only {', '.join(supported)} are")
    _refuse_partial_rotation(rope)
    rope_type = RopeType(name)
    theta = rope.positive("rope_theta", fields.positive("rope_theta", 10000.0))
    if rope_type is RopeType.DEFAULT:
        return RopeConfig(theta=theta)
    original = fields.size("original_max_position_embeddings", rope.size("original_max_position_embeddings", max_positions))
    # A YaRN checkpoint may leave the factor out and mean the ratio of the two context lengths.
    default_factor = max_positions / original if rope_type is RopeType.YARN and scaling.get("factor") is None else None
    config = RopeConfig(
        theta=theta,
        type=rope_type,
        factor=rope.positive("factor", default_factor),
        original_max_positions=original,
        low_freq_factor=rope.positive("low_freq_factor", 1.0),
        high_freq_factor=rope.positive("high_freq_factor", 4.0),
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", default=True),
    )
    if config.high_freq_factor <= config.low_freq_factor:
        raise CheckpointError(
            f"{fields.path}: high_freq_factor = {config.high_freq_factor} must be above low_freq_factor = {config.low_freq_factor}"
        )
    if rope_type is RopeType.YARN and math.isclose(theta, 1.0):
        raise CheckpointError(f"{fields.path}: rope_theta = {theta} cannot be used with yarn, it must differ from 1")
    return config


def _read_weight_type(fields: JsonFields, directory: Path) -> WeightType:
    name = fields.values.get("dtype") or fields.values.get("torch_dtype")
    if name is None or name == "auto":
        name = most_common_dtype(directory)
    weight_type = _WEIGHT_TYPES.get(str(name).removeprefix("torch."))
    if weight_type is None:
        raise CheckpointError(f"{fields.path}: weights of type {name!r} are not supported, only float32, float16 and bfloat16 are")
    return weight_type


def _bos_token_id(generation: Mapping[str, Any], values: Mapping[str, Any], family: Family) -> int | None:
    for source in (generation, values):
        if isinstance(source.get("bos_token_id"), int):
            return int(source["bos_token_id"])
    return None if "bos_token_id" in values else family.default_bos_token_id


def _eos_token_ids(generation: JsonFields, fields: JsonFields, family: Family) -> tuple[int, ...]:
    """Both files name end tokens and either may know one the other does not: the union, generation_config.json first."""
    default = () if "eos_token_id" in fields.values or family.default_eos_token_id is None else (family.default_eos_token_id,)
    return tuple(dict.fromkeys((*generation.token_ids("eos_token_id"), *fields.token_ids("eos_token_id"), *default)))
