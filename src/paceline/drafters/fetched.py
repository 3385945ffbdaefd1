"""The drafters that were downloaded for a target: one small file for each target in the cache directory.

`paceline doctor MODEL --fetch` writes the file. The drafter "auto" reads it. The directory of the model may be read-only.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from paceline.config import cache_directory
from paceline.errors import CheckpointError
from paceline.small_files import read_json, write_atomically

_RECORDS_SUBFOLDER = "drafters"
_NUM_HASH_DIGITS = 16


def record_fetched_drafter(target: Path, name: str, files: Path) -> None:
    """Record which drafter "auto" uses for a target; replace an earlier record.

    Args:
        name: the drafter's id on the Hugging Face Hub.
        files: path of its files.

    Raises:
        CheckpointError: the cache directory cannot be written.
    """
    path = _path_of_fetch_record(target)
    if path is None:
        raise CheckpointError(f"there is no cache directory to note {name} in: set PACELINE_CACHE, or use --drafter {name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"target": str(target.resolve()), "drafter": name, "path": str(files)}) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror}), so auto does not find {name}: set PACELINE_CACHE to a directory that "
            f"can be written, or use --drafter {name}"
        ) from error


def read_fetched_drafter(target: Path) -> tuple[str, Path] | None:
    """Return the id and the path of the drafter that was downloaded for a target; None if there is none."""
    path = _path_of_fetch_record(target)
    values = None
    with suppress(CheckpointError):  # a damaged record is ignored
        values = None if path is None else read_json(path)
    if values is None or not isinstance(values.get("drafter"), str) or not isinstance(values.get("path"), str):
        return None
    return values["drafter"], Path(values["path"])


def _path_of_fetch_record(target: Path) -> Path | None:
    """Return the file that records the downloaded drafter of a target; None if there is no cache directory."""
    directory, resolved = cache_directory(), target.resolve()
    digest = hashlib.sha256(str(resolved).encode("utf-8", "surrogateescape")).hexdigest()[:_NUM_HASH_DIGITS]
    return None if directory is None else directory / _RECORDS_SUBFOLDER / f"{digest}.json"
