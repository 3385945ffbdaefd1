"""Modes of a benchmark: our engine with and without each drafter, and other programs; each mode is a worker process."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.benchmarking.peers import PEERS, Peer, environment_python, make_environment
from paceline.benchmarking.plan import BenchPlan
from paceline.config import EngineConfig
from paceline.drafters import DRAFT_MODEL, DRAFTER_NAMES, DRAFTERS_IN_TARGET_FILES, MODEL_FREE_DRAFTERS, PreparedDrafter, prepare_drafter
from paceline.errors import BackendUnavailableError, CheckpointError, ConfigError, IncompatibleDrafterError
from paceline.models.checkpoint import is_gguf

PLAIN = "plain"
OURS = "paceline"
PREDICTION = "prediction"
OWN_WORKER = (sys.executable, "-m", "paceline.benchmarking.own_worker")


@dataclass(frozen=True, slots=True)
class Mode:
    """One mode, measured by one worker process.

    Attributes:
        name: ours are plain and the drafters' names; a peer's begins with the peer's.
        program: "paceline" or the peer's name.
        command: command line of the worker.
        order: first line sent to it.
        baseline: plain mode of the same program, whose tokens must be equal; its own name if it is that mode.
        needs_prediction: the mode runs only with prompts that have a prediction.
    """

    name: str
    program: str
    command: tuple[str, ...]
    order: Mapping[str, Any]
    baseline: str = PLAIN
    needs_prediction: bool = False

    @property
    def is_plain(self) -> bool:
        return self.name == self.baseline

    @property
    def is_own(self) -> bool:
        return self.program == OURS


def own_modes(plan: BenchPlan, target: Path, *, context: int, has_predictions: bool) -> list[Mode]:
    """Return plain decoding, and a mode for each chosen drafter, or for each available one.

    Raises:
        IncompatibleDrafterError, CheckpointError: one that was asked for can never work with this model.
        ConfigError: one is named twice, or "prediction" and no workload has predictions.
    """
    chosen = _drafters_by_mode(plan, target) if plan.drafters else _available(plan, target, has_predictions=has_predictions)
    if any(drafters == (PREDICTION,) for drafters in chosen.values()) and not has_predictions:
        raise ConfigError("drafter is 'prediction' and no prompt has one: add --workload copying, or prompts with a prediction")
    options = {"quantization": plan.quantization, "offline": plan.offline, "max_num_seqs": max(16, plan.batch_size)}
    more = {"draft": plan.draft_model, "precision": plan.quantization, "options": options}
    return [
        Mode(
            name,
            OURS,
            OWN_WORKER,
            {**_order(plan, target, name, context), **more, "drafters": list(drafters)},
            needs_prediction=drafters == (PREDICTION,),
        )
        for name, drafters in {PLAIN: (), **chosen}.items()
    ]


def _drafters_by_mode(plan: BenchPlan, target: Path) -> dict[str, tuple[str, ...]]:
    """Drafters by the name of their mode."""
    modes: dict[str, tuple[str, ...]] = {}
    for given in plan.drafters:
        parts = tuple(given.split("+")) if all(part in DRAFTER_NAMES for part in given.split("+")) else (given,)
        parts = tuple(plan.draft_model if part == DRAFT_MODEL and plan.draft_model else part for part in parts)
        if "none" in parts:
            raise ConfigError("drafter is 'none': plain decoding always runs; name drafters only")
        prepared = [_prepared(part, plan, target) for part in parts]
        name = given if len(parts) > 1 or given in DRAFTER_NAMES else f"{prepared[0].name} {Path(given).name}"
        if name in modes:
            raise ConfigError(f"drafter {given!r} is named twice: name each once")
        modes[name] = parts
    return modes


def _prepared(drafter: str, plan: BenchPlan, target: Path) -> PreparedDrafter:
    prepared = prepare_drafter(drafter, target, offline=plan.offline)
    assert prepared is not None
    return prepared


def _available(plan: BenchPlan, target: Path, *, has_predictions: bool) -> dict[str, tuple[str, ...]]:
    modes: dict[str, tuple[str, ...]] = {name: (name,) for name in MODEL_FREE_DRAFTERS if name != PREDICTION or has_predictions}
    found = {name: _if_there(name, plan, target) for name in (DRAFT_MODEL, *DRAFTERS_IN_TARGET_FILES, "auto")}
    if plan.draft_model is not None:
        found[DRAFT_MODEL] = _prepared(plan.draft_model, plan, target)
    for name, prepared in found.items():
        if prepared is None or (name == "auto" and prepared.name in MODEL_FREE_DRAFTERS):
            continue  # "auto" is that drafter alone, which has a mode already
        modes[name] = (plan.draft_model if name == DRAFT_MODEL and plan.draft_model else name,)
    return modes


def _if_there(name: str, plan: BenchPlan, target: Path) -> PreparedDrafter | None:
    try:
        return prepare_drafter(name, target, offline=plan.offline)
    except (CheckpointError, IncompatibleDrafterError, BackendUnavailableError):
        return None


def find_peer(name: str) -> Peer:
    """Return a peer of the table.

    Raises:
        ConfigError: there is none of this name.
    """
    wanted = _plain_name(name)
    found = next((peer for peer in PEERS.values() if _plain_name(peer.name) == wanted), None)
    if found is None:
        known = ", ".join(peer.name for peer in PEERS.values()) or "none"
        raise ConfigError(f"peer is {name!r}: use one of {known}")
    return found


def install_peer(name: str, print_line: Callable[[str], None]) -> None:
    """Create a peer's environment unless it exists; pip downloads its packages.

    Raises:
        ConfigError: there is no such peer.
        BackendUnavailableError: it cannot be installed here.
    """
    peer = find_peer(name)
    print_line(f"installing {peer.name}: {', '.join(peer.packages)}")
    python = make_environment(peer)
    print_line(f"{peer.name} is installed: {python}")


def peer_modes(plan: BenchPlan, target: Path, precision: str, *, context: int) -> tuple[list[Mode], Path | None]:
    """Return the modes of the chosen peers, and the draft model that they use.

    Raises:
        ConfigError: there is no such peer, or it cannot read the model's format.
        BackendUnavailableError: it is not installed.
    """
    prepared = _prepared(plan.draft_model, plan, target) if plan.draft_model else _if_there(DRAFT_MODEL, plan, target)
    draft = None if prepared is None or prepared.name != DRAFT_MODEL else prepared.path
    modes: list[Mode] = []
    for name in dict.fromkeys(plan.peers):
        peer = find_peer(name)
        python = environment_python(peer)
        if python is None:
            raise BackendUnavailableError(f"{peer.name} is not installed: paceline bench --install-peers {peer.name}")
        form = "gguf" if is_gguf(target) else "safetensors"
        if form not in peer.formats:
            known = " or ".join(sorted(peer.formats))
            raise ConfigError(f"{peer.name} reads {known} and {target} is {form}: give the model in such a form")
        for kind in (PLAIN, *(mode for mode in peer.modes if mode != PLAIN)):
            if kind == DRAFT_MODEL and draft is None:
                continue
            order = {**_order(plan, target, kind, context), "draft": str(draft) if kind == DRAFT_MODEL else None, "precision": precision}
            modes.append(Mode(f"{peer.name} {kind}", peer.name, (str(python), str(peer.worker)), order, f"{peer.name} {PLAIN}"))
    return modes, draft


def _order(plan: BenchPlan, target: Path, mode: str, context: int) -> dict[str, Any]:
    """Return the fields that the first line to every worker contains."""
    return {
        "model": str(target),
        "mode": mode,
        "threads": EngineConfig(threads=plan.threads).num_threads,
        "num_speculative_tokens": plan.num_speculative_tokens,
        "context": context,
    }


def _plain_name(name: str) -> str:
    return name.lower().replace(".", "_").replace("-", "_")
