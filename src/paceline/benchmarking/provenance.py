"""Provenance of measurements: machine, versions, commit, and the files of a model."""

import hashlib
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.config import QuantOptions
from paceline.errors import PacelineError
from paceline.installation import package_versions
from paceline.machine import available_memory_bytes, processor_flags, processor_model, total_memory_bytes, usable_processors
from paceline.models.checkpoint import is_gguf, read_model_config, weight_files
from paceline.models.gguf.file import open_gguf
from paceline.small_files import read_json

_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimddp")
_PACKAGES = ("numpy", "torch", "transformers", "tokenizers")
_HEADER_BYTES = 1 << 20
_SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's files.

    Attributes:
        name: as the user gave it.
        precision: the type of most of its weights, or how they are quantised while loading.
        is_grown: its config has "paceline_grown": it was enlarged without training.
        files: name, bytes, and the SHA-256 of the first MiB of each.
    """

    name: str
    path: Path
    precision: str
    is_grown: bool
    files: tuple[dict[str, Any], ...]

    @property
    def shown(self) -> str:
        """Its name, as reports show it."""
        return f"{self.name} (grown)" if self.is_grown else self.name

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "path": str(self.path), "precision": self.precision, "grown": self.is_grown, "files": list(self.files)}


def model_facts(name: str, path: Path, quantization: str | QuantOptions) -> ModelFacts:
    """Return the facts of a model.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    files = [*weight_files(path), *(path / one for one in _SMALL_FILES if not is_gguf(path) and (path / one).is_file())]
    if quantization != "none":
        precision = str(quantization)
    else:
        precision = open_gguf(path).main_block_type.lower() if is_gguf(path) else read_model_config(path).weight_type.value
    return ModelFacts(name, path, precision, is_grown(path), tuple(_file_facts(file) for file in files))


def is_grown(path: Path) -> bool:
    """Whether a checkpoint's config.json or GGUF metadata has a true "paceline_grown"."""
    try:
        if is_gguf(path):
            values = open_gguf(path).metadata
            return any(name in values and values[name] == 1 for name in ("paceline_grown", "paceline.grown"))  # some write a number
        return (read_json(path / "config.json") or {}).get("paceline_grown") is True
    except PacelineError:
        return False


def machine_facts() -> dict[str, Any]:
    """Return processor, memory, versions and the commit of a checkout."""
    return {
        "cpu": processor_model(),
        "flags": [flag for flag in _FLAGS if flag in processor_flags()],
        "cores": usable_processors(),
        "memory_bytes": total_memory_bytes(),
        "available_memory_bytes": available_memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {"paceline": __version__, **package_versions(*_PACKAGES)},
        "commit": commit(),
    }


def load_average() -> tuple[float, float, float] | None:
    """Return the load averages of 1, 5 and 15 minutes; None where the system has none."""
    try:
        one, five, fifteen = os.getloadavg()
    except (OSError, AttributeError):
        return None
    return round(one, 2), round(five, 2), round(fifteen, 2)


def commit(directory: Path = Path(__file__).parent) -> str | None:
    """Return the commit of the checkout that contains this package, and whether it has changes; None outside of one."""
    found = _git(directory, "rev-parse", "--short=12", "HEAD")
    tracked = _git(directory, "ls-files", "--", str(Path(__file__).with_name("__init__.py")))
    if not found or not tracked:  # the package may be installed inside another repository
        return None
    return f"{found}, with uncommitted changes" if _git(directory, "status", "--porcelain", "--", str(directory.parent)) else found


def _git(directory: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _file_facts(file: Path) -> dict[str, Any]:
    with open(file, "rb") as content:
        digest = hashlib.sha256(content.read(_HEADER_BYTES)).hexdigest()
    return {"name": file.name, "bytes": file.stat().st_size, "sha256_of_first_mib": digest}
