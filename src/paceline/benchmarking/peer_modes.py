"""Modes of other programs: those that were asked for, are installed, and can read the model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.benchmarking.modes import PLAIN, Mode, draft_model_path
from paceline.benchmarking.peers import PEERS, Peer
from paceline.benchmarking.peers.environment import environment_python, make_environment
from paceline.benchmarking.plan import BenchPlan
from paceline.config import EngineConfig
from paceline.errors import BackendUnavailableError, ConfigError
from paceline.models.checkpoint import is_gguf


def find_peer(name: str) -> Peer:
    """A peer of the table.

    Raises:
        ConfigError: there is none of this name.
    """
    wanted = _plain_name(name)
    found = next((peer for peer in PEERS.values() if _plain_name(peer.name) == wanted), None)
    if found is None:
        known = ", ".join(peer.name for peer in PEERS.values()) or "none"
        raise ConfigError(f"peer is {name!r}: use one of {known}")
    return found


def install_peer(name: str, say: Callable[[str], None]) -> None:
    """Make a peer's environment, unless it is there; pip downloads its packages.

    Raises:
        ConfigError: there is no such peer.
        BackendUnavailableError: it cannot be installed here.
    """
    peer = find_peer(name)
    say(f"installing {peer.name}: {', '.join(peer.packages)}")
    python = make_environment(peer)
    say(f"{peer.name} is installed: {python}")


def peer_modes(plan: BenchPlan, target: Path, precision: str, *, context: int) -> tuple[list[Mode], Path | None]:
    """The modes of the peers that were asked for, and the draft model that they, or our own mode, guess with.

    Raises:
        ConfigError: there is no such peer, or it cannot read the model's format.
        BackendUnavailableError: it is not installed.
    """
    draft = draft_model_path(plan, target)
    modes: list[Mode] = []
    for name in dict.fromkeys(plan.peers):
        peer = find_peer(name)
        python = environment_python(peer)
        if python is None:
            raise BackendUnavailableError(f"{peer.name} is not installed: paceline bench --install-peers {peer.name}")
        _check_format(peer, target)
        for kind in (PLAIN, *(mode for mode in peer.modes if mode != PLAIN)):
            if kind == "draft_model" and draft is None:
                continue
            modes.append(_mode(peer, kind, python, _order(plan, target, draft, kind, precision, context)))
    return modes, draft


def _mode(peer: Peer, kind: str, python: Path, order: dict[str, Any]) -> Mode:
    return Mode(f"{peer.name} {kind}", peer.name, (str(python), str(peer.worker)), order, f"{peer.name} {PLAIN}")


def _order(plan: BenchPlan, target: Path, draft: Path | None, kind: str, precision: str, context: int) -> dict[str, Any]:
    return {
        "model": str(target),
        "draft": None if draft is None or kind != "draft_model" else str(draft),
        "mode": kind,
        "threads": EngineConfig(threads=plan.threads).num_threads,
        "num_speculative_tokens": plan.num_speculative_tokens,
        "context": context,
        "precision": precision,
    }


def _check_format(peer: Peer, target: Path) -> None:
    form = "gguf" if is_gguf(target) else "safetensors"
    if form not in peer.formats:
        raise ConfigError(f"{peer.name} reads {' or '.join(sorted(peer.formats))} and {target} is {form}: give the model in such a form")


def _plain_name(name: str) -> str:
    return name.lower().replace(".", "_").replace("-", "_")
