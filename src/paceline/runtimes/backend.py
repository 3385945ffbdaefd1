"""Choose the device and the backend (native kernels or torch) of a network on this machine."""

import importlib.util
import sys
from pathlib import Path

from paceline.config import BACKENDS
from paceline.errors import BackendUnavailableError, ConfigError
from paceline.installation import install_extra


def choose_device(device: str, backend: str) -> str:
    """Return the device to run on, "cpu" or "cuda". With "auto" it is "cuda" if torch finds such a device.

    Raises:
        BackendUnavailableError: device is "cuda", and torch or the device is missing.
    """
    if device == "cpu" or backend == "native":
        return "cpu"
    if device == "auto" and not _may_have_cuda():
        return "cpu"
    try:
        import torch
    except ImportError as error:
        if device == "cuda":
            raise BackendUnavailableError(f"device 'cuda' needs torch: {install_extra('torch')}") from error
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise BackendUnavailableError("device is 'cuda', but torch finds no CUDA device: use --device cpu")
    return "cpu"


def choose_backend(backend: str, device: str, *, notices: list[str]) -> str:
    """Return the backend to use, "native" or "torch". With "auto" it is "native" on a CPU for which kernels were built.

    Args:
        backend: "auto", "native" or "torch".
        notices: lines for the user; one is appended if "auto" falls back to torch.

    Raises:
        ConfigError: the backend does not exist.
        BackendUnavailableError: its library is not installed.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}: use {', '.join(BACKENDS)}")
    chosen = _best_backend(device, notices) if backend == "auto" else backend
    if chosen == "torch" and not _has_torch():
        raise BackendUnavailableError(f"backend 'torch' needs torch: {install_extra('torch')}, or use --backend native")
    return chosen


def _best_backend(device: str, notices: list[str]) -> str:
    if device == "cuda":
        return "torch"
    from paceline.runtimes.native.library import kernels_path

    if kernels_path() is not None:
        return "native"
    if not _has_torch():
        raise BackendUnavailableError(f"there are no native kernels for this machine: {install_extra('torch')}")
    notices.append("there are no native kernels for this machine: using torch")
    return "torch"


def _may_have_cuda() -> bool:
    """Return whether a CUDA driver may be installed. This avoids importing torch, which takes seconds."""
    return not sys.platform.startswith("linux") or any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))


def _has_torch() -> bool:
    """Return whether torch is installed, without importing it, which takes seconds."""
    return importlib.util.find_spec("torch") is not None
