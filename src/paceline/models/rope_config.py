"""Settings of rotary embeddings, read from config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from paceline.errors import CheckpointError, shortened
from paceline.models.json_fields import JsonFields

if TYPE_CHECKING:
    from paceline.models.families.family import Family


class RopeType(Enum):
    """How rotary frequencies are scaled beyond the trained context."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    DYNAMIC = "dynamic"
    LONGROPE = "longrope"
    PROPORTIONAL = "proportional"  # Gemma 4: only the first pairs of a head rotate

    @property
    def depends_on_length(self) -> bool:
        return self in (RopeType.DYNAMIC, RopeType.LONGROPE)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Settings of rotary embeddings: the base (theta) and the scaling of frequencies. `models/rope.py` has the formulas.

    Attributes:
        original_max_positions: context length before scaling.
        rotated_fraction: share of a head's values that rotate, starting with the first. For PROPORTIONAL, share of its pairs.
        scaled_context_len: context length for which length-dependent frequencies are computed; 0 = the original length.
        attention_temperature_scale, attention_temperature_len: a and b in the factor of queries, 1 + a * ln(1 + floor(position / b)).
    """

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
    rotated_fraction: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    scaled_context_len: int = 0
    attention_temperature_scale: float = 0.0
    attention_temperature_len: int = 0

    @property
    def is_limited_to_original_len(self) -> bool:
        """Return whether these frequencies are valid for contexts up to the original length only (longrope, dynamic)."""
        return self.type.depends_on_length and self.scaled_context_len <= self.original_max_positions

    def rotary_size(self, head_size: int) -> int:
        """Return the number of values of a head that are in rotary pairs."""
        return head_size if self.type is RopeType.PROPORTIONAL else int(head_size * self.rotated_fraction)

    def for_context(self, max_model_len: int | None) -> "RopeConfig":
        """Return the settings for texts of up to `max_model_len` positions; None = the original context length."""
        if not self.type.depends_on_length:
            return self
        return replace(self, scaled_context_len=max(max_model_len or 0, self.original_max_positions))


def read_rope(fields: JsonFields, family: "Family", *, head_size: int, layer_type: str = "full_attention") -> RopeConfig:
    """Read the settings of rotary embeddings from `rope_parameters`, or from `rope_theta` and `rope_scaling` of older files.

    Args:
        layer_type: type of the layers whose settings are read: full_attention or sliding_attention.

    Raises:
        CheckpointError: A value is missing or out of range, or the type is not supported.
    """
    rope = _read_frequencies(fields, family, head_size, layer_type)
    own = JsonFields(_rope_parameters_for(fields, family, layer_type), fields.path)
    scale = own.number("llama_4_scaling_beta", 0.0)
    if scale != 0.0 and not family.has_temperature_tuning:
        raise CheckpointError(f"{fields.path}: llama_4_scaling_beta = {scale} is not supported for {family.name}, only 0 is")
    if scale == 0.0:
        return rope
    return replace(rope, attention_temperature_scale=scale, attention_temperature_len=own.integer("original_max_position_embeddings"))


def _read_frequencies(fields: JsonFields, family: "Family", head_size: int, layer_type: str) -> RopeConfig:
    scaling = _rope_parameters_for(fields, family, layer_type)
    rope = JsonFields(scaling, fields.path)
    rope_type = _read_rope_type(fields, family, scaling)
    theta_name = "rope_local_base_freq" if family.has_local_rope and layer_type != "full_attention" else "rope_theta"
    theta = rope.positive_number("rope_theta", fields.positive_number(theta_name, 10000.0))
    if rope_type is RopeType.PROPORTIONAL:
        return RopeConfig(theta, rope_type, rope.positive_number("factor", 1.0), rotated_fraction=_read_rotated_pair_fraction(rope))
    fraction = _read_rotated_fraction(fields, family, rope, head_size)
    max_positions = fields.integer("max_position_embeddings")
    if rope_type is RopeType.DEFAULT:
        return RopeConfig(theta=theta, rotated_fraction=fraction)
    if rope_type is RopeType.DYNAMIC and family.has_rope_alpha and scaling.get("alpha"):
        rotary_size = RopeConfig(rotated_fraction=fraction).rotary_size(head_size)
        return RopeConfig(theta=_theta_times_alpha(theta, rope.positive_number("alpha"), rotary_size, fields))
    if rope_type is RopeType.DYNAMIC:
        return RopeConfig(theta, rope_type, rope.positive_number("factor"), max_positions, rotated_fraction=fraction)
    name = "original_max_position_embeddings"
    original = fields.integer(name, rope.integer(name, max_positions))
    # As in transformers, a missing factor is the ratio of the new to the original context length.
    uses_length_ratio = rope_type in (RopeType.YARN, RopeType.LONGROPE) and scaling.get("factor") is None
    if uses_length_ratio and fields.values.get(name) is None and scaling.get(name) is None:
        raise CheckpointError(f"{fields.path}: the rope parameters of type {rope_type.value!r} have neither factor nor {name}")
    config = RopeConfig(
        theta=theta,
        type=rope_type,
        factor=rope.positive_number("factor", max_positions / original if uses_length_ratio else None),
        original_max_positions=original,
        low_freq_factor=rope.positive_number("low_freq_factor", 1.0),
        high_freq_factor=rope.positive_number("high_freq_factor", 4.0),
        beta_fast=rope.positive_number("beta_fast", 32.0),
        beta_slow=rope.positive_number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", default=True),
        rotated_fraction=fraction,
    )
    if rope_type is RopeType.LONGROPE:
        if original < 2:
            raise CheckpointError(f"{fields.path}: original_max_position_embeddings = {original}, longrope needs at least 2")
        num_pairs = config.rotary_size(head_size) // 2
        short, long = (rope.positive_numbers(name, num_pairs) for name in ("short_factor", "long_factor"))
        return replace(config, short_factors=short, long_factors=long)
    _check_scaling_parameters(config, fields)
    return config


def _rope_parameters_for(fields: JsonFields, family: "Family", layer_type: str) -> Mapping[str, Any]:
    scaling = _rope_fields(fields)
    if isinstance(scaling, Mapping) and any(isinstance(value, Mapping) for value in scaling.values()) and family.has_local_rope:
        scaling = scaling.get(layer_type) or {}
    elif family.requires_local_rope_parameters and fields.values.get("rope_parameters"):
        raise CheckpointError(
            f"{fields.path}: rope_parameters = {shortened(scaling)} of {family.name} are one set, which transformers ignores: "
            "give one for full_attention and one for sliding_attention"
        )
    elif family.has_local_rope and layer_type != "full_attention":
        return {}  # in older files rope_scaling applies to full-attention layers only
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
        raise CheckpointError(f"{fields.path}: rope parameters {shortened(scaling)} are not supported, expected one set for all layers")
    return scaling


def _rope_fields(fields: JsonFields) -> Any:
    """Return `rope_parameters`, or `rope_scaling` of older files. If a file has both, they must be equal."""
    newer, older = fields.values.get("rope_parameters") or {}, fields.values.get("rope_scaling") or {}
    if newer and older and _with_default_theta(newer, fields) != _with_default_theta(older, fields):
        raise CheckpointError(
            f"{fields.path}: rope_parameters = {shortened(newer)} and rope_scaling = {shortened(older)} differ: "
            "keep rope_parameters with the right values, rope_theta included, and remove rope_scaling"
        )
    return newer or older


def _with_default_theta(scaling: Any, fields: JsonFields) -> Any:
    if not isinstance(scaling, Mapping):
        return scaling
    defaults = {"rope_type": scaling.get("type", "default"), "rope_theta": fields.values.get("rope_theta", 10000.0)}
    return {name: value for name, value in {**defaults, **scaling}.items() if name != "type"}


def _read_rope_type(fields: JsonFields, family: "Family", scaling: Mapping[str, Any]) -> RopeType:
    name = scaling.get("rope_type", scaling.get("type", "default"))
    name = family.rope_type_aliases.get(name, name) if isinstance(name, str) else name
    supported = [rope_type.value for rope_type in RopeType]
    if name not in supported:
        raise CheckpointError(f"{fields.path}: rope type {shortened(name)} is not supported, only {', '.join(supported)} are")
    return RopeType(name)


def _read_rotated_fraction(fields: JsonFields, family: "Family", rope: JsonFields, head_size: int) -> float:
    fraction = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if fraction != 1.0 and not family.has_partial_rope:
        raise CheckpointError(f"{fields.path}: partial_rotary_factor = {fraction} is not supported for {family.name}, only 1.0 is")
    rotary_size = int(head_size * fraction) if 0.0 < fraction <= 1.0 else 0
    if rotary_size % 2 or rotary_size < 2:
        raise CheckpointError(
            f"{fields.path}: partial_rotary_factor = {fraction} rotates {rotary_size} of {head_size} values a head, expected an even number"
        )
    return fraction


def _theta_times_alpha(theta: float, alpha: float, rotary_size: int, fields: JsonFields) -> float:
    """Return the base times alpha^(R / (R - 2)) for R rotated values of a head. Source: Hunyuan's model in transformers 5.24."""
    if rotary_size == 2:
        raise CheckpointError(f"{fields.path}: rope parameter alpha = {alpha} needs more than 2 rotated values per head")
    return float(theta * alpha ** (rotary_size / (rotary_size - 2)))


def _read_rotated_pair_fraction(rope: JsonFields) -> float:
    fraction = rope.number("partial_rotary_factor", 1.0)
    if not 0.0 < fraction <= 1.0:
        raise CheckpointError(f"{rope.path}: partial_rotary_factor = {fraction}, expected a number above 0 and up to 1")
    return fraction


def _check_scaling_parameters(config: RopeConfig, fields: JsonFields) -> None:
    if config.high_freq_factor <= config.low_freq_factor:
        raise CheckpointError(
            f"{fields.path}: high_freq_factor = {config.high_freq_factor} must be above low_freq_factor = {config.low_freq_factor}"
        )
    if config.type is RopeType.YARN and math.isclose(config.theta, 1.0):
        raise CheckpointError(f"{fields.path}: rope_theta = {config.theta} cannot be used with yarn, it must differ from 1")
