"""Detects the kind of a drafting head from its config, or else from the names and shapes of its tensors."""

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from paceline.errors import IncompatibleDrafterError


class HeadKind(Enum):
    """Drafting method that a head was trained for. Heads of some methods are detected but not supported."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    PEAGLE = "peagle"
    MEDUSA = "medusa"
    MTP = "mtp"
    GEMMA4_ASSISTANT = "gemma4_assistant"
    HYDRA = "hydra"
    DFLASH = "dflash"
    DFLASH2 = "dflash2"
    DSPARK = "dspark"
    DOMINO = "domino"
    XPRESS = "xpress"
    LILICORR = "lilicorr"
    MLP = "mlp"
    PARD2 = "pard2"
    LANGUAGE_MODEL = "draft_model"


MEDUSA_AND_HYDRA_FILE_NAMES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt")
"""Names of files that always contain a Medusa or Hydra head."""

_SPECULATORS_MODEL_TYPES = {
    "independent": HeadKind.LANGUAGE_MODEL,
    **{kind: HeadKind(kind) for kind in ("eagle", "eagle3", "peagle", "mtp", "dflash", "dflash2", "dspark", "xpress", "mlp")},
}
_KIND_BY_ARCHITECTURE = {
    "PEagle": HeadKind.PEAGLE,
    "Peagle": HeadKind.PEAGLE,
    "LiLiCorr": HeadKind.LILICORR,
    "DSpark": HeadKind.DSPARK,
    "DFlash2": HeadKind.DFLASH2,
    "XPress": HeadKind.XPRESS,
    "Domino": HeadKind.DOMINO,
    "DFlash": HeadKind.DFLASH,
    "MuseGlimmerAssistant": HeadKind.DFLASH,
    "MLPSpeculator": HeadKind.MLP,
}  # substring of the architecture in config.json -> kind; the first match is used
_ASSISTANT_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_MEDUSA_TENSOR_PATTERN = re.compile(r"\d+\.\d+\.linear\.|medusa_heads?\.|blocks\.\d+\.layers\.\d+\.|lm_heads\.\d+\.")
_PARALLEL_DRAFTING_KEYS = ("ptd_token_id", "pard_token")


def detect_head_kind(path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], files: Iterable[Path]) -> HeadKind:
    """Return the kind of the head, or LANGUAGE_MODEL if nothing indicates a head.

    Args:
        path: path of the head, for error messages.
        config: contents of config.json; empty if there is none.
        shapes: shapes of the tensors, by their names without prefixes.
        files: paths of the files that contain the tensors.

    Raises:
        IncompatibleDrafterError: a speculators config has an unknown `speculators_model_type`.
    """
    if "speculators_model_type" in config:
        model_type = str(config["speculators_model_type"])
        if model_type not in _SPECULATORS_MODEL_TYPES:
            supported = ", ".join(kind.value for kind in (HeadKind.EAGLE, HeadKind.EAGLE3, HeadKind.PEAGLE, HeadKind.MTP))
            raise IncompatibleDrafterError(f"{path} holds a speculators head of unknown type {model_type!r}; types {supported} can be used")
        return _SPECULATORS_MODEL_TYPES[model_type]
    if config.get("model_type") in _ASSISTANT_MODEL_TYPES:
        return HeadKind.GEMMA4_ASSISTANT
    if config.get("pard2") or config.get("spd_type") == HeadKind.PARD2.value:
        return HeadKind.PARD2
    levels = [level for level in (config, config.get("dflash_config")) if isinstance(level, Mapping)]
    if any(level.get("projector_type") == "domino" for level in levels) or any(name.startswith("prefix_gru.") for name in shapes):
        return HeadKind.DOMINO
    architecture = " ".join(_architectures(config))
    for part, kind in _KIND_BY_ARCHITECTURE.items():
        if part in architecture:
            return detect_block_kind(shapes) if kind is HeadKind.DFLASH else kind
    if "mask_hidden" in shapes:
        return HeadKind.PEAGLE
    if "dflash_config" in config:
        return detect_block_kind(shapes)
    names = {file.name for file in files}
    if not config and ("hidden_norm.weight" in shapes or "encoder.fc.weight" in shapes):
        return detect_block_kind(shapes)  # without config.json, the tensor names determine the kind
    if "Eagle3" in architecture or _is_eagle3(shapes):
        is_parallel = config.get("parallel_drafting") is True or any(config.get(name) is not None for name in _PARALLEL_DRAFTING_KEYS)
        return HeadKind.PEAGLE if is_parallel else HeadKind.EAGLE3
    if _is_eagle1(shapes):
        return HeadKind.EAGLE
    if names & set(MEDUSA_AND_HYDRA_FILE_NAMES[:2]) or any(_MEDUSA_TENSOR_PATTERN.match(name) for name in shapes):
        return HeadKind.MEDUSA
    if MEDUSA_AND_HYDRA_FILE_NAMES[2] in names or any(name.startswith("hydra_mlp.") for name in shapes):
        return HeadKind.HYDRA
    extra_layer = f"layers.{config.get('num_hidden_layers')}.eh_proj.weight"
    if extra_layer in shapes or any(name.startswith(("mtp.", "mtp_layers.")) for name in shapes):
        return HeadKind.MTP
    return HeadKind.LANGUAGE_MODEL


def detect_block_kind(shapes: Mapping[str, tuple[int, ...]]) -> HeadKind:
    """Return the kind of a block drafter: DFlash, DFlash2 or DSpark, detected from its tensor names."""
    if any(name.startswith("candidate_selector.") for name in shapes):
        return HeadKind.DFLASH2
    return HeadKind.DSPARK if any("markov_" in name for name in shapes) else HeadKind.DFLASH


def _architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the first architecture in config.json, and the first in its field `model`, the nested config of vLLM's format."""
    found = []
    for values in (config, config.get("model")):
        architectures = values.get("architectures") if isinstance(values, Mapping) else None
        found += [str(architectures[0])] if isinstance(architectures, list) and architectures else []
    return found


def _is_eagle3(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    fc = shapes.get("fc.weight", ())
    reads_three_layers = len(fc) == 2 and fc[1] >= 3 * fc[0]
    return (
        reads_three_layers
        or "d2t" in shapes
        or "layers.0.hidden_norm.weight" in shapes
        or any(name.startswith("midlayer.") for name in shapes)
    )


def _is_eagle1(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether shapes are those of EAGLE-1: `fc` maps [embedding, feature] to the hidden state that the first layer takes."""
    fc = shapes.get("fc.weight", shapes.get("fusion_fc.weight", ()))
    query = shapes.get("layers.0.self_attn.q_proj.weight", shapes.get("transformer.self_attn.q_proj.weight", ()))
    return len(fc) == 2 and fc[1] == 2 * fc[0] and query[-1:] == fc[:1]
