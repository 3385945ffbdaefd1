"""Detects the method that a head's files are for, from its config, else from its tensors."""

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from paceline.errors import IncompatibleDrafterError


class HeadKind(Enum):
    """The drafting method that files are for; some methods have no drafter."""

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
    LANGUAGE_MODEL = "draft_model"


METHOD_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt")
"""Files that hold a head and nothing else."""

_SPECULATORS = {
    "independent": HeadKind.LANGUAGE_MODEL,
    **{kind: HeadKind(kind) for kind in ("eagle", "eagle3", "peagle", "mtp", "dflash", "dflash2", "dspark", "xpress", "mlp")},
}
_ARCHITECTURES = {
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
}  # substrings of architecture names; the first match decides
_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
_MEDUSA_NAMES = re.compile(r"\d+\.\d+\.linear\.|medusa_heads?\.|blocks\.\d+\.layers\.\d+\.|lm_heads\.\d+\.")
_PARALLEL_TOKENS = ("ptd_token_id", "pard_token")


def kind_of(path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], files: Iterable[Path]) -> HeadKind:
    """Return the first method that the files match.

    Args:
        path: path of the head, for errors.
        shapes: shapes of the tensors, by their names without prefixes.

    Raises:
        IncompatibleDrafterError: a speculators config names an unknown method.
    """
    if "speculators_model_type" in config:
        named = str(config["speculators_model_type"])
        if named not in _SPECULATORS:
            known = ", ".join(kind.value for kind in (HeadKind.EAGLE, HeadKind.EAGLE3, HeadKind.PEAGLE, HeadKind.MTP))
            raise IncompatibleDrafterError(f"{path} holds a speculators head of unknown type {named!r}; types {known} can be used")
        return _SPECULATORS[named]
    if config.get("model_type") in _ASSISTANTS:
        return HeadKind.GEMMA4_ASSISTANT
    if config.get("projector_type") == "domino" or any(name.startswith("prefix_gru.") for name in shapes):
        return HeadKind.DOMINO
    architecture = " ".join(_architectures(config))
    for part, kind in _ARCHITECTURES.items():
        if part in architecture:
            return kind
    if "mask_hidden" in shapes:
        return HeadKind.PEAGLE
    if "dflash_config" in config:
        return HeadKind.DSPARK if any("markov_" in name for name in shapes) else HeadKind.DFLASH
    names = {file.name for file in files}
    if "Eagle3" in architecture or _is_eagle3(shapes):
        is_parallel = config.get("parallel_drafting") is True or any(config.get(name) is not None for name in _PARALLEL_TOKENS)
        return HeadKind.PEAGLE if is_parallel else HeadKind.EAGLE3
    if _is_eagle(shapes):
        return HeadKind.EAGLE
    if names & set(METHOD_FILES[:2]) or any(_MEDUSA_NAMES.match(name) for name in shapes):
        return HeadKind.MEDUSA
    if METHOD_FILES[2] in names or any(name.startswith("hydra_mlp.") for name in shapes):
        return HeadKind.HYDRA
    extra_layer = f"layers.{config.get('num_hidden_layers')}.eh_proj.weight"
    if extra_layer in shapes or any(name.startswith(("mtp.", "mtp_layers.")) for name in shapes):
        return HeadKind.MTP
    return HeadKind.LANGUAGE_MODEL


def _architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the architectures in the config, and in the nested model config of vLLM's form."""
    found = []
    for values in (config, config.get("model")):
        architectures = values.get("architectures") if isinstance(values, Mapping) else None
        found += [str(architectures[0])] if isinstance(architectures, list) and architectures else []
    return found


def _is_eagle3(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    fc = shapes.get("fc.weight", ())
    mixes_boundaries = len(fc) == 2 and fc[1] >= 3 * fc[0]
    return (
        mixes_boundaries
        or "d2t" in shapes
        or "layers.0.hidden_norm.weight" in shapes
        or any(name.startswith("midlayer.") for name in shapes)
    )


def _is_eagle(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether `fc` mixes token and feature before an ordinary first layer, as in EAGLE-1."""
    fc = shapes.get("fc.weight", shapes.get("fusion_fc.weight", ()))
    query = shapes.get("layers.0.self_attn.q_proj.weight", shapes.get("transformer.self_attn.q_proj.weight", ()))
    return len(fc) == 2 and fc[1] == 2 * fc[0] and query[-1:] == fc[:1]
