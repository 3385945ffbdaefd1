"""The table of supported families. Each file of this package lists one or several in `FAMILIES`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, shortened
from paceline.models.families import (
    deepseek,
    ernie,
    exaone,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt_oss,
    granite,
    layer_norm,
    lfm2,
    llama,
    muse_glimmer,
    nemotron_h,
    olmo,
    qwen,
    qwen_hybrid,
)
from paceline.models.families.family import Family

_FAMILY_MODULES = (
    llama, deepseek, ernie, qwen, gemma, gemma3n, gemma4, olmo, exaone, granite, glm, gpt_oss, qwen_hybrid, lfm2,
    nemotron_h, falcon_h1, layer_norm, muse_glimmer,
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {family.name: family for module in _FAMILY_MODULES for family in module.FAMILIES}


def find_family(values: Mapping[str, Any], path: Path) -> Family:
    """Return the family of a config.json by its `model_type`, or by its architecture if there is none.

    Raises:
        CheckpointError: The family is not supported, or the model is not a causal language model.
    """
    architectures = values.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else None
    model_type = values.get("model_type")
    by_architecture = {family.architecture.lower(): family for family in FAMILIES.values()}
    family = by_architecture.get(str(architecture).lower()) if model_type is None else FAMILIES.get(str(model_type))
    if family is None or (architecture is not None and architecture.lower() != family.architecture.lower()):
        raise CheckpointError(
            f"{path} describes model_type {shortened(model_type)} with architecture {shortened(architecture)}, which is not supported; "
            f"supported are {', '.join(f'{known.name} ({known.architecture})' for known in FAMILIES.values())}"
        )
    return family
