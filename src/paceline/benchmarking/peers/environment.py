"""The virtual environments that peers run in."""

from pathlib import Path

from paceline.benchmarking.peers import Peer
from paceline.config import cache_directory
from paceline.errors import BackendUnavailableError


def environment_python(peer: Peer) -> Path | None:
    """The Python of a peer's environment; None where it is not installed."""
    cache = cache_directory()
    python = None if cache is None else cache / "peers" / peer.name / "bin" / "python"
    return python if python is not None and python.is_file() else None


def make_environment(peer: Peer) -> Path:
    """Install a peer, unless it is; returns its Python.

    Raises:
        BackendUnavailableError: it cannot be installed here.
    """
    python = environment_python(peer)
    if python is None:
        raise BackendUnavailableError(f"{peer.name} cannot be installed by this version: leave out --peer {peer.name}")
    return python
