"""The conventions that an EAGLE head's files leave open: all ways in which heads with such files are known to have been trained.

Boundaries may be off by one: trainers number layer outputs, runtimes layer inputs, and files are converted between the two. Base of
rotations: the reference trainer of EAGLE ignores `rope_theta`. The others have defaults that differ between trainers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.drafters.eagle.boundaries import named_boundaries
from paceline.drafters.eagle.config import EagleConfig, means_no_norm, read_eagle_config
from paceline.drafters.eagle.layers import written_rope
from paceline.drafters.eagle.layout import config_fields, is_nested, plain_files
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.pairs.config import PairVariant
from paceline.models.config import ModelConfig
from paceline.models.json_fields import JsonFields
from paceline.models.rope_config import RopeConfig, RopeType

PLAIN_BASE = 10000.0


def admitted(files: HeadFiles, target: ModelConfig, named: PairVariant | None) -> tuple[EagleConfig, ...]:
    """The ways to read a head's files: the one the user names, else every possible one, the documented default first.

    Raises:
        CheckpointError, IncompatibleDrafterError: the files are not of a head for this target.
    """
    config = read_eagle_config(files, target, named)
    return (as_named(config, named, target),) if named is not None and named.settles else candidates(files, config, target)


def candidates(files: HeadFiles, config: EagleConfig, target: ModelConfig) -> tuple[EagleConfig, ...]:
    """Every way the files admit; `config`, which is the documented default of all that is open, comes first.

    Args:
        config: what `read_eagle_config` made of the files.
    """
    files = plain_files(files)
    fields = config_fields(files)
    found = [config]
    if config.boundaries:
        found = [replace(one, boundaries=shifted) for one in found for shifted in _shifts(config.boundaries, target.num_layers)]
    if not config.is_first and fields.values.get("norm_before_residual") is None:
        found = [replace(one, norm_before_residual=flag) for one in found for flag in (False, True)]
    attention = config.layers.attention
    if attention.rope.theta != PLAIN_BASE and not files.is_speculators:
        found = [one for with_base in found for one in (with_base, replace(with_base, layers=_with_plain_base(with_base.layers)))]
    written = written_rope(files, fields, attention.head_size)
    if written != attention.rope:  # vLLM rotates a part of each head where the classes of speculators rotate it all
        found = [one for plain in found for one in (plain, replace(plain, layers=_with_rope(plain.layers, written)))]
    found = _final_norms(files, fields, config, found)
    if not config.is_first:
        return tuple(found)
    if config.norms_mixture and not is_nested(files):  # HASS was trained with its second norm on the feature; some leave the mixture plain
        found = [
            one
            for read in found
            for one in (read, replace(read, norms_mixture=False, norms_feature=files.is_speculators or read.norms_feature))
        ]
    if "fc.bias" in files.tensors and fields.values.get("bias") is False:
        found = [replace(one, uses_fc_bias=flag) for one in found for flag in (config.uses_fc_bias, not config.uses_fc_bias)]
    return tuple(found)


def as_named(config: EagleConfig, variant: PairVariant, target: ModelConfig) -> EagleConfig:
    """What a user says of a head; all else is the documented default.

    Raises:
        IncompatibleDrafterError: the target has no such boundaries, or the head takes more or fewer.
    """
    if variant.boundaries is not None:
        config = replace(config, boundaries=named_boundaries(variant.boundaries, len(config.boundaries), target.num_layers))
    if variant.norm_before_residual is not None:
        config = replace(config, norm_before_residual=variant.norm_before_residual)
    if variant.rope_theta is not None:
        rope = replace(config.layers.attention.rope, theta=variant.rope_theta)
        config = replace(config, layers=_with_rope(config.layers, rope))
    if variant.normed_recurrence is not None:
        config = replace(config, normed_recurrence=variant.normed_recurrence)
    return config


def all_boundaries(configs: Sequence[EagleConfig]) -> tuple[int, ...]:
    """The boundaries that any of them reads, ascending."""
    return tuple(sorted({boundary for config in configs for boundary in config.boundaries}))


def _final_norms(files: HeadFiles, fields: JsonFields, config: EagleConfig, found: Sequence[EagleConfig]) -> list[EagleConfig]:
    """Whether the norm behind the layers is for the logits alone, for the next feature too, or for neither."""
    if means_no_norm(files, fields):
        return [one for plain in found for one in (plain, replace(plain, has_final_norm=True))]
    is_said = files.is_speculators and fields.values.get("norm_output") is not None
    if not config.has_final_norm or is_said or config.kind is HeadKind.PEAGLE:
        return list(found)
    flags = (config.normed_recurrence, not config.normed_recurrence)
    return [replace(one, normed_recurrence=flag) for one in found for flag in flags]


def _shifts(boundaries: tuple[int, ...], num_layers: int) -> Iterator[tuple[int, ...]]:
    for shift in (0, 1, -1):
        if boundaries[0] + shift >= 0 and boundaries[-1] + shift <= num_layers:
            yield tuple(boundary + shift for boundary in boundaries)


def _with_plain_base(layers: ModelConfig) -> ModelConfig:
    """With the reference trainer's base; a scaling that belongs to the target's base is dropped."""
    rope = layers.attention.rope
    is_scaled = rope.type in (RopeType.LINEAR, RopeType.DYNAMIC)
    return _with_rope(layers, replace(rope, theta=PLAIN_BASE) if is_scaled else RopeConfig(theta=PLAIN_BASE))


def _with_rope(layers: ModelConfig, rope: RopeConfig) -> ModelConfig:
    return layers.with_attention(lambda attention: replace(attention, rope=rope))
