"""The drafters that "auto" knows for a target, apart from those in the target's own directory.

`paceline doctor MODEL --fetch` notes a downloaded drafter in a small file in the cache directory, so a model's own directory may be
read-only. The package itself holds drafters of a few public models, each next to a `target.json` that tells for which file it was trained.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from paceline.config import cache_directory
from paceline.errors import CheckpointError
from paceline.small_files import read_json, write_atomically

_FOLDER = "drafters"
_NUM_HASH_DIGITS = 16
_HEADER_BYTES = 1 << 20  # of a GGUF file: its metadata, the vocabulary, and the sizes of its tensors


@dataclass(frozen=True, slots=True)
class FetchedDrafter:
    """A downloaded drafter: its id on the Hugging Face Hub, and the path of its files."""

    name: str
    path: Path


def record_fetched_drafter(target: Path, drafter: FetchedDrafter) -> None:
    """Store that a drafter is to be used for a target; it replaces an earlier one.

    Raises:
        CheckpointError: the cache directory cannot be written.
    """
    path = _record_path(target)
    if path is None:
        raise CheckpointError(f"there is no cache directory to note {drafter.name} in: set PACELINE_CACHE, or use --drafter {drafter.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"target": str(target.resolve()), "drafter": drafter.name, "path": str(drafter.path)}) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror}), so auto does not find {drafter.name}: set PACELINE_CACHE to a directory that "
            f"can be written, or use --drafter {drafter.name}"
        ) from error


def read_fetched_drafter(target: Path) -> FetchedDrafter | None:
    """Return the drafter that was downloaded for a target; None if there is none."""
    path = _record_path(target)
    values = None
    with suppress(CheckpointError):  # a damaged record is as none
        values = None if path is None else read_json(path)
    if values is None or not isinstance(values.get("drafter"), str) or not isinstance(values.get("path"), str):
        return None
    return FetchedDrafter(values["drafter"], Path(values["path"]))


def find_packaged_drafter(target: Path) -> Path | None:
    """Return the file of this package's drafter for a GGUF file, which is recognised by its size and first MiB; None if it has none."""
    if not target.is_file():
        return None
    num_bytes = target.stat().st_size
    for folder in sorted((Path(str(resources.files("paceline"))) / "assets" / _FOLDER).glob("*/")):
        expected = read_json(folder / "target.json") or {}
        if expected.get("bytes") == num_bytes:
            with open(target, "rb") as file:
                digest = hashlib.sha256(file.read(_HEADER_BYTES)).hexdigest()
            if digest == expected.get("sha256_of_first_mib"):
                return folder / "drafter.gguf"
    return None


def _record_path(target: Path) -> Path | None:
    directory, resolved = cache_directory(), target.resolve()
    digest = hashlib.sha256(str(resolved).encode("utf-8", "surrogateescape")).hexdigest()[:_NUM_HASH_DIGITS]
    return None if directory is None else directory / _FOLDER / f"{digest}.json"
