"""Under what circumstances a benchmark ran, and its numbers as a table. Standard library only: every engine's environment can import it."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
_PACKAGES = ("numpy", "torch", "transformers", "llama-cpp-python", "gguf")


def describe_machine(versions: dict[str, str] | None = None) -> dict[str, Any]:
    """Processor, its flags that matter for matrices, usable cores, load now, library versions and the commit.

    Args:
        versions: of libraries that live in other environments; this one's go before them.
    """
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    return {
        "cpu": fields.get("model name", platform.processor()),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "versions": {**(versions or {}), **package_versions()},
        "commit": _commit(),
    }


def package_versions() -> dict[str, str]:
    """Versions of the libraries that do the computing, where installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "tools")
    return (git("rev-parse", "--short", "HEAD") or "none") + (" with uncommitted changes" if changed else "")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The rows under `head`, columns aligned."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
