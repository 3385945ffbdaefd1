"""Where a report's numbers come from: files, versions, machine and settings."""

import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig, SpeculationConfig
from paceline.machine import processor_name, usable_processors
from paceline.models.checkpoint import weight_files
from paceline.proof.exactness.subject import Subject
from paceline.runtimes.native.library import kernels_path

_PACKAGES = ("paceline", "numpy", "tokenizers", "transformers", "torch")
_UNSAID = ("hf_token",)  # of the settings: a secret


def provenance(
    subject: Subject, directory: Path, engine: EngineConfig, speculation: SpeculationConfig, command: Sequence[str]
) -> dict[str, Any]:
    """Everything that somebody needs to repeat a report.

    Args:
        directory: the target's, or its GGUF file.
        command: the arguments of this process.
    """
    runtime = subject.opened.engine.runtime
    kernels = kernels_path()
    settings = {name: value for name, value in asdict(engine).items() if name not in _UNSAID}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _without_token(command),
        "model": engine.model,
        "files": {path.name: path.stat().st_size for path in weight_files(directory)},
        "family": runtime.config.family,
        "weights": runtime.capabilities.weight_type.value,
        "numerics": subject.opened.numerics,
        "device": runtime.capabilities.device,
        "kernels": runtime.version or f"torch on {runtime.capabilities.device}",
        "kernel_library": None if kernels is None or not runtime.version else kernels.name,
        "drafters": list(subject.drafter_names),
        "processor": _processor(),
        "processors_used": usable_processors(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "engine": settings,
        "speculation": asdict(speculation),
    }


def _without_token(command: Sequence[str]) -> list[str]:
    """The arguments with the Hub's access token left out: reports are passed on."""
    previous = ["", *command[:-1]]
    return [
        "--hf-token=…" if one.startswith("--hf-token=") else "…" if before == "--hf-token" else one
        for before, one in zip(previous, command, strict=True)
    ]


def _processor() -> str:
    """Its name alone."""
    line = next((line for line in processor_name().splitlines() if line.startswith("model name")), "")
    return line.partition(":")[2].strip() or platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
