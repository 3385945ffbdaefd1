"""Download a published drafter for a target, check that the two fit, and note it for the drafter "auto"."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.drafters import DRAFTER_NAMES
from paceline.drafters.fetched import record_fetched_drafter
from paceline.errors import CheckpointError, ConfigError
from paceline.hub import plan_download, resolve_model
from paceline.proof.doctor import Diagnosis, DoctorOptions, diagnose
from paceline.proof.doctor_text import format_bytes
from paceline.proof.suggested_drafters import recommend_drafter


@dataclass(frozen=True, slots=True)
class Fetched:
    """A drafter that was downloaded.

    Attributes:
        drafter: its id on the Hub.
        num_bytes: size of its files.
        is_used: whether it fits, so that the drafter "auto" uses it for the target from now on.
    """

    drafter: str
    path: Path
    num_bytes: int
    is_used: bool

    def as_dict(self) -> dict[str, Any]:
        return {"drafter": self.drafter, "path": str(self.path), "bytes": self.num_bytes, "is_used": self.is_used}


def fetch_drafter(options: DoctorOptions, report: Callable[[str], None]) -> tuple[Diagnosis, Fetched | None]:
    """Download the drafter that the options name, or else the recommended one, and diagnose the target with it.

    Args:
        options: its drafters are ("auto",), or the id of one drafter on the Hub.
        report: gets a line before the download: what is downloaded, its size, and where its files are stored.

    Returns:
        the diagnosis with the downloaded drafter, and what was downloaded. If the target cannot work, its diagnosis and None.

    Raises:
        ConfigError: no drafter is published for the target, or the options name something else than one drafter on the Hub.
        CheckpointError: the Hub cannot be reached or denies access, the disk is full, or the cache directory cannot be written.
    """
    named = _named_drafter(options)
    probe_arguments = options.probe_arguments and {**options.probe_arguments, "drafter": "none"}
    without = replace(options.speculation, drafter="none", draft_adapter=None, drafter_options={})
    found = diagnose(replace(options, speculation=without, probe_arguments=None if named else probe_arguments))
    if not found.works or found.target is None:
        return found, None
    name = named or _recommended(found)
    plan = plan_download(name)
    if plan.missing_bytes > plan.free_bytes:
        raise CheckpointError(
            f"{name} needs {format_bytes(plan.missing_bytes)}, and {plan.directory} has {format_bytes(plan.free_bytes)} free: free space, "
            "or set HF_HOME to a directory on another disk"
        )
    size = format_bytes(plan.num_bytes) if plan.missing_bytes else "all files are there already"
    report(f"downloading {name} from the Hugging Face Hub into {plan.directory}: {size}")
    path, target = resolve_model(name, with_heads=True), found.target.path
    probe_arguments = None if options.probe_arguments is None else {**options.probe_arguments, "drafter": str(path)}
    found = diagnose(replace(options, speculation=replace(options.speculation, drafter=str(path)), probe_arguments=probe_arguments))
    if found.works:
        record_fetched_drafter(target, name, path)
    return found, Fetched(name, path, plan.num_bytes, found.works)


def _named_drafter(options: DoctorOptions) -> str | None:
    """Return the id of the drafter that the options names; None = the recommended one."""
    names = options.drafters
    if names == ("auto",):
        return None
    if len(names) > 1 or names[0] in DRAFTER_NAMES or "/" not in names[0] or Path(names[0]).exists():
        raise ConfigError(
            f"--fetch downloads one drafter, and --drafter is {', '.join(names)}: give one id on the Hugging Face Hub (owner/name), or "
            "leave --drafter out for the recommended one"
        )
    return names[0]


def _recommended(found: Diagnosis) -> str:
    best = recommend_drafter(found.suggested)
    if best is None:
        inside = next((one.drafter for one in found.suggested if one.location == "checkpoint"), None)
        raise ConfigError(
            f"{found.model} has an {inside} layer in its own files, which auto uses: nothing is to be downloaded"
            if inside is not None
            else f"no drafter that helps is known for {found.model}: name one with --drafter owner/name, or train one "
            "(paceline train, docs/training.md)"
        )
    return best.drafter
