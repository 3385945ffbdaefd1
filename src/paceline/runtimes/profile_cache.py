"""Measurements of this machine, stored in a JSON file so that later runs need not repeat them."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from paceline.machine import processor_name

FILE_NAME = "measured.json"


class ProfileCache:
    """A JSON file of measurements by `profile_key`.

    Args:
        directory: directory of the file; None = store nothing.
    """

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / FILE_NAME

    def get(self, key: str) -> Any:
        """Return the value stored for a key; None if there is none or the file cannot be read."""
        return self._read().get(key)

    def put(self, key: str, value: Any) -> None:
        """Store a value for a key. If the file cannot be written, nothing is stored. The file is replaced atomically."""
        if self._path is None:
            return
        values = {**self._read(), key: value}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=FILE_NAME)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(values, file, indent=1)
            os.replace(name, self._path)
        except OSError:
            return

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return values if isinstance(values, dict) else {}


def profile_key(measurement: str, *dependencies: object) -> str:
    """Return the name of a measurement and a digest of everything its value depends on: `dependencies` and this processor."""
    digest = hashlib.sha256("\n".join(map(repr, (*dependencies, processor_name()))).encode()).hexdigest()[:24]
    return f"{measurement}:{digest}"
