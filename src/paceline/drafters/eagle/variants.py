"""What the files of an EAGLE head leave open: the ways in which heads that look like this one are known to have been trained.

Reading off by one layer: trainers number the outputs of layers, runtimes what enters them, and files are converted between the two. Base
of rotations: the reference trainer of EAGLE ignores `rope_theta`. The others have defaults that differ between trainers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.drafters.eagle.boundaries import named_boundaries
from paceline.drafters.eagle.checkpoint import EagleConfig, config_fields, plain_files
from paceline.drafters.head_files import HeadFiles, HeadKind
from paceline.drafters.pairs.config import PairVariant
from paceline.models.config import ModelConfig, RopeConfig, RopeType

PLAIN_BASE = 10000.0


def candidates(files: HeadFiles, config: EagleConfig, target: ModelConfig) -> tuple[EagleConfig, ...]:
    """Every way the files admit; `config`, which is the documented default of all that is open, comes first.

    Args:
        config: what `read_eagle_config` made of the files.
    """
    files = plain_files(files)
    fields = config_fields(files)
    is_speculators = "speculators_model_type" in files.config
    found = [config]
    if config.boundaries:
        found = [replace(one, boundaries=shifted) for one in found for shifted in _shifts(config.boundaries, target.num_layers)]
    if config.kind is HeadKind.EAGLE3 and fields.values.get("norm_before_residual") is None:
        found = [replace(one, norm_before_residual=flag) for one in found for flag in (False, True)]
    if config.layers.rope.theta != PLAIN_BASE and not is_speculators:
        found = [one for with_base in found for one in (with_base, replace(with_base, layers=_with_plain_base(with_base.layers)))]
    if config.has_final_norm and not (is_speculators and fields.values.get("norm_output") is not None):
        found = [replace(one, normed_recurrence=flag) for one in found for flag in (False, True)]
    if config.kind is HeadKind.EAGLE and "fc.bias" in files.tensors and fields.values.get("bias") is False:
        found = [replace(one, uses_fc_bias=flag) for one in found for flag in (True, False)]
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
        config = replace(config, layers=replace(config.layers, rope=replace(config.layers.rope, theta=variant.rope_theta)))
    if variant.normed_recurrence is not None:
        config = replace(config, normed_recurrence=variant.normed_recurrence)
    return config


def all_boundaries(configs: Sequence[EagleConfig]) -> tuple[int, ...]:
    """The boundaries that any of them reads, ascending."""
    return tuple(sorted({boundary for config in configs for boundary in config.boundaries}))


def _shifts(boundaries: tuple[int, ...], num_layers: int) -> Iterator[tuple[int, ...]]:
    for shift in (0, 1, -1):
        if boundaries[0] + shift >= 0 and boundaries[-1] + shift <= num_layers:
            yield tuple(boundary + shift for boundary in boundaries)


def _with_plain_base(layers: ModelConfig) -> ModelConfig:
    """As the reference trainer has it; a scaling that goes with the target's base goes with it."""
    rope = layers.rope
    is_scaled = rope.type in (RopeType.LINEAR, RopeType.DYNAMIC)
    return replace(layers, rope=replace(rope, theta=PLAIN_BASE) if is_scaled else RopeConfig(theta=PLAIN_BASE))
