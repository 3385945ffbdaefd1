"""Drafters that are on this machine already: in the model's own files, beside them, in the hub's cache."""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.drafters import find_head, prepare_one
from paceline.drafters.head_kinds import HeadKind
from paceline.errors import PacelineError
from paceline.hub import cached_models, gguf_models
from paceline.models.checkpoint import is_gguf, read_model_config
from paceline.small_files import is_file

_MOST_ENTRIES = 200  # of a directory that is looked through
_OWN = ("auto", HeadKind.LANGUAGE_MODEL.value, HeadKind.MTP.value, HeadKind.MEDUSA.value)


@dataclass(frozen=True, slots=True)
class LocalDrafter:
    """A drafter's files.

    Attributes:
        asked_as: what `--drafter` takes.
        path: of its files.
        name: what else it is known as: its hub id, where it is in the cache.
        is_looked_for: it lies in a directory that the user named.
    """

    asked_as: str
    path: Path
    name: str = ""
    is_looked_for: bool = False


def own_drafters(model: Path) -> list[LocalDrafter]:
    """What comes with the model: a draft model, an assistant, layers for multi-token prediction, Medusa heads."""
    found: dict[tuple[str, Path], LocalDrafter] = {}
    for asked_as in _OWN:
        try:
            prepared = prepare_one(asked_as, model, offline=True)
        except PacelineError:  # it has none, or not one that can be used; naming it says which
            continue
        if prepared is not None and prepared.path is not None:
            found.setdefault((prepared.name, prepared.path.resolve()), LocalDrafter(asked_as, prepared.path))
    return list(found.values())


def drafters_around(model: Path, look_in: Sequence[Path]) -> list[LocalDrafter]:
    """Networks beside the model, in some directories and in the hub's cache, the target's own left out.

    Args:
        look_in: further directories.
    """
    found = {path.resolve(): LocalDrafter(name, path, name) for name, path in cached_models().items()}
    beside = [] if model.parent.name == "snapshots" else [model.parent]
    for directory in (*look_in, *beside):
        for path in _networks_in(directory):
            found.setdefault(path.resolve(), LocalDrafter(str(path), path, is_looked_for=directory in look_in))
    own = model.resolve()
    folder = own.parent if own.is_file() else own
    return [drafter for path, drafter in found.items() if path not in (own, folder) and not (own.is_dir() and own in path.parents)]


def unreadable_places(look_in: Sequence[Path]) -> list[tuple[Path, str]]:
    """Directories that were to be looked through and cannot be, themselves or one level below, and why."""
    places = [path for directory in look_in for path in (directory, *_entries(directory))]
    return [(path, f"it cannot be read: {why}") for path in places if (why := _why_closed(path)) is not None]


def why_no_network(path: Path) -> str | None:
    """Why the files hold nothing that can guess; None = they may."""
    try:
        if find_head(path) is None:
            read_model_config(path)
    except PacelineError as error:
        return str(error)
    return None


def _networks_in(directory: Path) -> Iterator[Path]:
    """Directories with a config.json or one GGUF file and GGUF files, in a directory and one level below.

    What lies in the directory itself comes first, so that a link within it does not name what it leads back to.
    """
    entries = _entries(directory)
    networks = [path for path in entries if _is_network(path)]
    yield from networks
    around = {directory.resolve(), *directory.resolve().parents}
    for path in entries:
        if path not in networks and os.path.isdir(path) and path.resolve() not in around:
            yield from (inner for inner in _entries(path) if _is_network(inner))


def _is_network(path: Path) -> bool:
    if os.path.isdir(path):
        return is_file(path / "config.json") or any(inner.match("medusa_lm_head.*") for inner in _entries(path))
    return is_gguf(path) and path in _first_parts(path.parent)


def _why_closed(path: Path) -> str | None:
    """Why the system lets nobody see what is there, or what is in it; None = it does, or nothing is there."""
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            next(path.iterdir(), None)
            os.stat(path / "config.json")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return None if error.errno == errno.ELOOP else error.strerror or str(error)
    return None


def _first_parts(directory: Path) -> list[Path]:
    try:
        return gguf_models(directory)
    except PacelineError:
        return []


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())[:_MOST_ENTRIES]
    except OSError:
        return []
