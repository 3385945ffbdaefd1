"""Other programs that paceline is compared with: a table, and an environment of its own for each."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import cache_directory
from paceline.errors import BackendUnavailableError
from paceline.small_files import write_atomically

_HERE = Path(__file__).resolve().parent
RECORD = "installed.json"
"""Written last, into an environment: its requirements."""

_CPU_BUILD = "+cpu"


@dataclass(frozen=True, slots=True)
class Peer:
    """A program that generates text.

    Attributes:
        name: what users call it.
        packages: pinned requirements for pip, torch first.
        formats: of model files that it is given: safetensors, gguf, openvino.
        modes: words of plain, ngram, draft_model, mtp.
        worker: the script that its own Python runs; it imports nothing of paceline.
        alone: further requirements, installed without what they depend on.
        needs: what an installation needs in addition to pip.
    """

    name: str
    packages: tuple[str, ...]
    formats: frozenset[str]
    modes: tuple[str, ...]
    worker: Path
    alone: tuple[str, ...] = ()
    needs: str = ""


_SAFETENSORS = frozenset({"safetensors"})

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name="llama.cpp",
            packages=("llama-cpp-python==0.3.36", "gguf==0.19.0"),
            formats=_SAFETENSORS | {"gguf"},
            modes=("plain", "ngram", "draft_model"),
            worker=_HERE / "llama_cpp_worker.py",
            needs="a C++ compiler: pip builds llama.cpp",
        ),
        Peer(
            name="transformers",
            packages=("torch==2.13.0+cpu", "transformers==5.23.0", "accelerate==1.15.0"),
            formats=_SAFETENSORS,
            modes=("plain", "ngram", "draft_model"),
            worker=_HERE / "transformers_worker.py",
        ),
        Peer(
            name="openvino_genai",
            packages=(
                "torch==2.13.0+cpu", "transformers==5.5.4", "openvino==2026.4.1", "openvino-genai==2026.4.1.0",
                "openvino-tokenizers==2026.4.1.0", "nncf==3.4.0", "optimum==2.3.0", "requests==2.34.2", "setuptools<81",
            ),
            formats=_SAFETENSORS | {"openvino"},
            modes=("plain", "ngram", "draft_model"),
            worker=_HERE / "openvino_genai_worker.py",
            alone=("optimum-intel==2.2.0",),  # by itself it brings a torchvision that torch's CPU build cannot load
        ),
        Peer(
            name="mistral.rs",
            packages=("mistralrs==0.9.5",),
            formats=_SAFETENSORS,
            modes=("plain",),
            worker=_HERE / "mistral_rs_worker.py",
        ),
    )
}  # fmt: skip
"""By name."""


def environment_python(peer: Peer) -> Path | None:
    """Return the Python of a peer's environment; None where it is missing, incomplete, or made for other requirements."""
    directory = _directory(peer)
    if directory is None:
        return None
    try:
        installed = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    python = _python(directory)
    return python if installed == _requirements(peer) and python.is_file() else None


def make_environment(peer: Peer) -> Path:
    """Install a peer unless it is installed, and return its Python. Remains of an earlier attempt are deleted.

    Raises:
        BackendUnavailableError: it cannot be installed here.
    """
    python = environment_python(peer)
    if python is not None:
        return python
    directory = _directory(peer)
    if directory is None:
        raise BackendUnavailableError(f"{peer.name} needs a cache directory to be installed in: set PACELINE_CACHE to one")
    try:
        shutil.rmtree(directory, ignore_errors=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", str(directory)])
        _install(peer, str(_python(directory)))
    except (OSError, subprocess.CalledProcessError) as error:
        needs = f"; it needs {peer.needs}" if peer.needs else ""
        raise BackendUnavailableError(
            f"{peer.name} cannot be installed here: {_reason(error)}{needs}; leave out --peer {peer.name}"
        ) from error
    write_atomically(directory / RECORD, json.dumps(_requirements(peer)))
    return _python(directory)


def _install(peer: Peer, python: str) -> None:
    """Install torch first: its CPU build needs its full version, and not every package index has it."""
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    packages = list(peer.packages)
    builds = [package for package in packages if package.endswith(_CPU_BUILD)]
    if builds:
        try:
            _run([*pip, *builds])
        except subprocess.CalledProcessError:
            packages = [package.removesuffix(_CPU_BUILD) for package in packages]
            _run([*pip, *(package.removesuffix(_CPU_BUILD) for package in builds)])
    _run([*pip, *packages])
    if peer.alone:
        _run([*pip, "--no-deps", *peer.alone])


def _requirements(peer: Peer) -> list[str]:
    return [*peer.packages, *peer.alone]


def _directory(peer: Peer) -> Path | None:
    cache = cache_directory()
    return None if cache is None else cache.absolute() / "peers" / peer.name


def _python(directory: Path) -> Path:
    return directory / "Scripts" / "python.exe" if os.name == "nt" else directory / "bin" / "python"


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line.strip() for line in (error.stderr or "").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]
        return (errors or lines or [f"{error.cmd[0]} ended with exit code {error.returncode}"])[-1]
    return str(error)
