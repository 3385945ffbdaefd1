"""Which runtime serves a network on this machine, and the line that says so where it is not what one would expect."""

import importlib.util
import sys
from pathlib import Path

from paceline.config import BACKENDS
from paceline.errors import BackendUnavailableError, ConfigError
from paceline.installation import install_extra


def choose_device(device: str, backend: str) -> str:
    """ "cpu" or "cuda".

    Raises:
        BackendUnavailableError: CUDA was asked for and is not there.
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
        raise BackendUnavailableError("device 'cuda' was asked for, but torch finds no CUDA device: use --device cpu")
    return "cpu"


def choose_backend(backend: str, device: str, *, notices: list[str]) -> str:
    """ "native" or "torch": our own kernels wherever they were built, because they are exact and the fastest there.

    Args:
        backend: what was asked for; "auto" = choose.
        notices: gets a line where torch has to take over.

    Raises:
        ConfigError: there is no such backend.
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
    notices.append("there are no native kernels for this machine: the torch runtime takes over")
    return "torch"


def _may_have_cuda() -> bool:
    """Whether a driver is there at all; importing torch to find out takes seconds."""
    return not sys.platform.startswith("linux") or any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))


def _has_torch() -> bool:
    """Asked without importing it, which takes seconds."""
    return importlib.util.find_spec("torch") is not None
