"""Drafters that are part of the package, each for one published model.

A folder of `assets/drafters` holds `eagle3.gguf`, a model card and `target.json`: the sizes of the target, and a hash of its final norm.
That tensor is not quantised in GGUF files, so a target is recognised in any quantization. A fine-tuned target usually has another norm.
"""

import hashlib
from importlib import resources
from pathlib import Path

import numpy as np

from paceline.errors import PacelineError
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.config import ModelConfig
from paceline.models.weights import as_float32
from paceline.small_files import read_json

DRAFTER_FILE, TARGET_FILE = "eagle3.gguf", "target.json"


def packaged_drafters() -> Path:
    """Return the directory of the packaged drafters."""
    return Path(str(resources.files("paceline"))) / "assets" / "drafters"


def find_packaged_drafter(target: Path, directory: Path | None = None) -> Path | None:
    """Return the file of the drafter that was trained for a target; None if there is none, or the target cannot be read.

    Args:
        target: directory or GGUF file.
        directory: directory of the drafters; None = that of the package.
    """
    try:
        config = read_model_config(target)
        for path in sorted((directory or packaged_drafters()).glob(f"*/{TARGET_FILE}")):
            expected = read_json(path) or {}
            if _model_sizes(config) == expected.get("sizes") and final_norm_hash(target, config) == expected.get("final_norm_sha256"):
                return path.with_name(DRAFTER_FILE)
    except PacelineError:
        return None  # loading the target raises the error later
    return None


def describe_target(target: Path) -> dict[str, object]:
    """Return what identifies the target of a packaged head: sizes, and a hash of the final norm. It is stored as `target.json`."""
    config = read_model_config(target)
    return {"sizes": _model_sizes(config), "final_norm_sha256": final_norm_hash(target, config)}


def final_norm_hash(target: Path, config: ModelConfig) -> str:
    """Return the SHA-256 of the final norm's weight, converted to float32."""
    values = as_float32(open_weights(target, config, num_threads=1)["final_norm.weight"])
    return hashlib.sha256(np.ascontiguousarray(values, np.float32).tobytes()).hexdigest()


def _model_sizes(config: ModelConfig) -> dict[str, int]:
    return {"hidden_size": config.hidden_size, "num_layers": config.num_layers, "vocab_size": config.vocab_size}
